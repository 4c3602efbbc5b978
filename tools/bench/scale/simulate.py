"""The simulation of a trace of requests on a layout of GPUs, step by step, in simulated time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from piecegraph.tools.bench.scale.layout_cost import Layout, Link, ModelSize, RankTimes, stage_seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """What a trace took on a layout."""

    layout: Layout
    seconds: float  # from the first arrival to the last token
    output_tokens: int
    mean_first_token_s: float  # from a request's arrival to its first token
    mean_latency_s: float  # to its last
    p99_latency_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    def as_record(self) -> dict[str, object]:
        """Return every field by name, derived values included."""
        return {
            "gpus": self.layout.num_gpus,
            "tensor_parallel_size": self.layout.tensor,
            "pipeline_parallel_size": self.layout.pipeline,
            "data_parallel_size": self.layout.data,
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "mean_first_token_s": self.mean_first_token_s,
            "mean_latency_s": self.mean_latency_s,
            "p99_latency_s": self.p99_latency_s,
        }


def poisson_trace(
    num_requests: int, rate: float | None, prompt_tokens: int, output_tokens: int, seed: int
) -> list[Arrival]:
    """Return equal requests that arrive at random, `rate` a second on average; None: all at once."""
    random, at = Random(seed), 0.0
    found = []
    for _ in range(num_requests):
        found.append(Arrival(at, prompt_tokens, output_tokens))
        at += random.expovariate(rate) if rate is not None else 0.0
    return found


def simulate(
    trace: Sequence[Arrival],
    layout: Layout,
    times: RankTimes,
    size: ModelSize,
    link: Link,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
) -> ScaleRow:
    """Return what `trace`, in the order of arrival, takes on `layout`.

    Each engine runs at most `max_num_seqs` requests, and a step has at most `max_num_batched_tokens` tokens: a longer
    prompt runs in chunks.
    """
    shares: list[list[Arrival]] = [[] for _ in range(layout.data)]
    for number, arrival in enumerate(trace):
        shares[number % layout.data].append(arrival)
    firsts: list[float] = []
    lasts: list[float] = []
    end = 0.0
    for share in shares:
        engine = _Engine(layout, times, size, link, max_num_seqs, max_num_batched_tokens)
        found = engine.run(share)
        firsts += [first - arrival.at_s for arrival, (first, _) in zip(share, found, strict=True)]
        lasts += [last - arrival.at_s for arrival, (_, last) in zip(share, found, strict=True)]
        end = max([end, *(last for _, last in found)])
    return ScaleRow(
        layout=layout,
        seconds=end - trace[0].at_s,
        output_tokens=sum(arrival.output_tokens for arrival in trace),
        mean_first_token_s=sum(firsts) / len(firsts),
        mean_latency_s=sum(lasts) / len(lasts),
        p99_latency_s=sorted(lasts)[int(0.99 * (len(lasts) - 1))],
    )


@dataclass(slots=True)
class _Request:
    number: int
    uncomputed: int  # tokens of the prompt
    left: int  # tokens of the output


class _Engine:
    """One engine of data parallelism, whose stages have a batch each."""

    def __init__(
        self, layout: Layout, times: RankTimes, size: ModelSize, link: Link, max_num_seqs: int, max_tokens: int
    ) -> None:
        self._cost = layout, times, size, link
        self._num_stages = layout.pipeline
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens

    def run(self, trace: Sequence[Arrival]) -> list[tuple[float, float]]:
        """Return the time of the first and of the last token of each request."""
        firsts, lasts = [0.0] * len(trace), [0.0] * len(trace)
        coming = deque(enumerate(trace))
        ready: list[_Request] = []  # running, and in no batch
        flying: list[tuple[float, int, list[tuple[_Request, int]]]] = []  # batches by the time of their end
        now, free_at, num_running, num_batches = 0.0, 0.0, 0, 0
        while coming or ready or flying:
            if len(flying) < self._num_stages:
                now = max(now, free_at)
                while coming and coming[0][1].at_s <= now and num_running < self._max_num_seqs:
                    number, arrival = coming.popleft()
                    ready.append(_Request(number, arrival.prompt_tokens, arrival.output_tokens))
                    num_running += 1
                batch = self._batch(ready, num_running)
                if batch:
                    tokens = sum(count for _, count in batch)
                    seconds = stage_seconds(tokens, len(batch), *self._cost)
                    free_at = now + seconds  # the first stage takes the next batch then
                    end = max([now + self._num_stages * seconds, *(each[0] + seconds for each in flying)])
                    heapq.heappush(flying, (end, num_batches, batch))
                    num_batches += 1
                    continue
            if not flying:
                now = max(now, coming[0][1].at_s)
                continue
            next_arrival = coming[0][1].at_s if coming and num_running < self._max_num_seqs else float("inf")
            if now < next_arrival < flying[0][0] and len(flying) < self._num_stages:
                now = next_arrival
                continue
            end, _, batch = heapq.heappop(flying)
            now = max(now, end)
            for request, count in batch:
                if request.uncomputed:
                    request.uncomputed -= count
                    if request.uncomputed:
                        ready.append(request)
                        continue
                    firsts[request.number] = end
                request.left -= 1
                lasts[request.number] = end
                if request.left:
                    ready.append(request)
                else:
                    num_running -= 1
        return list(zip(firsts, lasts, strict=True))

    def _batch(self, ready: list[_Request], num_running: int) -> list[tuple[_Request, int]]:
        """Take a batch out of `ready`: decodes first, then prompts while tokens are left."""
        places = -(-num_running // self._num_stages)
        budget = self._max_tokens
        batch: list[tuple[_Request, int]] = []
        for request in sorted(ready, key=lambda each: (each.uncomputed > 0, each.number)):
            count = min(request.uncomputed or 1, budget)
            if not count or len(batch) == places:
                break
            batch.append((request, count))
            budget -= count
        taken = {id(request) for request, _ in batch}
        ready[:] = [request for request in ready if id(request) not in taken]
        return batch
