"""Measure tokens per second of an offline workload, beside the floor, and where a step's time goes.

The workload is that of nano-vllm's bench.py: random token ids, lengths of prompts and outputs uniform in a range, and
no request ends early. The same seed gives the same prompts and lengths as there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piecegraph.errors import ConfigError
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.latency import model_size
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.engines import Holder, from_engines
from piecegraph.tools.bench.measure.floor import ModelSize, keys_seen
from piecegraph.tools.bench.measure.offline_workload import Lengths, Workload

WARM_UP_LENGTHS = 32
WARM_UP = (
    f"the same prompts at each temperature, request i answered with 1 + i % {WARM_UP_LENGTHS} tokens, so that the "
    "batch fills and shrinks; the prefix cache is emptied before every run"
)


def workload_floor_seconds(
    size: ModelSize,
    ceilings: Ceilings,
    requests: Sequence[Lengths],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    shared_prefix: int = 0,
    num_engines: int = 1,
) -> float:
    """Return a lower bound of the seconds that any schedule of `requests` takes: weights, and then the cache.

    Weights are read once in each of the fewest possible steps, or multiplied by every token (the logits' by drawn ones
    only), whichever takes longer in all. Each step that decodes reads the keys and values of the tokens before it that
    it sees. `shared_prefix` tokens are computed once. A prompt's attention to itself counts as nothing.

    `num_engines` engines, each with all weights and at most `max_num_seqs` requests, divide all of it evenly.
    """
    drawn = sum(request.output for request in requests)
    # The last token of an output is drawn and not computed.
    computed = sum(request.prompt + request.output - 1 for request in requests) - shared_prefix * (len(requests) - 1)
    steps = max(  # of each engine
        max(request.output for request in requests),
        -(-drawn // (max_num_seqs * num_engines)),
        -(-computed // (max_num_batched_tokens * num_engines)),
    )
    multiplied = (size.params_a_token * computed + size.logits_params * drawn) / num_engines
    weights = max(
        steps * size.bytes_read(computed / num_engines / steps) / ceilings.read_bytes_per_s,
        2 * multiplied / ceilings.flops_per_s,
    )
    tokens_read = {  # by reach, since layers differ in little else; a step's own token is not read
        reach: sum(
            keys_seen(reach, before + 1) - 1
            for request in requests
            for before in range(request.prompt, request.prompt + request.output - 1)
        )
        for reach in {layer.cache_spec.reach for layer in size.layers}
    }
    cached = sum(tokens_read[layer.cache_spec.reach] * layer.cache_spec.page_bytes(1) for layer in size.layers)
    return weights + cached / num_engines / ceilings.read_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRun:
    """One run of the whole workload, all engines together."""

    seconds: float  # of `LLM.generate`, from the first request queued to the last token on the host
    steps: int
    steps_by_engine: tuple[int, ...]
    steps_by_mode: dict[str, int]
    computed_tokens: int  # without padding; prompts less what was cached, and outputs
    prefix_hit_rate: float  # tokens found in the prefix cache, of those looked for
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """The runs at one temperature; figures are those of the median run by time."""

    temperature: float
    prompt_tokens: int
    output_tokens: int
    floor_s: float
    runs: tuple[ThroughputRun, ...]

    @property
    def median(self) -> ThroughputRun:
        return sorted(self.runs, key=lambda run: run.seconds)[(len(self.runs) - 1) // 2]

    def as_record(self) -> dict[str, object]:
        """Return every field by name, derived values included."""
        run, seconds = self.median, [run.seconds for run in self.runs]
        return {
            "temperature": self.temperature,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seconds": run.seconds,
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "output_tokens_per_s": self.output_tokens / run.seconds,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / run.seconds,
            "steps": run.steps,
            "steps_by_engine": run.steps_by_engine,
            "steps_by_mode": run.steps_by_mode,
            "mean_batch": self.output_tokens / run.steps,  # requests that draw a token in a step
            "computed_tokens": run.computed_tokens,
            "prefix_hit_rate": run.prefix_hit_rate,
            "preemptions": run.preemptions,
            "floor_s": self.floor_s,
            "share_of_floor": self.floor_s / run.seconds,
            "runs": self.runs,
        }


def throughput_notes(num_engines: int) -> tuple[str, ...]:
    """Return what to know of the figures of `num_engines` engines; nothing for one."""
    if num_engines == 1:
        return ()
    return (
        f"figures are of {num_engines} engines together, to which the front door gave the requests: steps and modes "
        "are those of all, a batch is that of one engine's step, and the floor divides the work evenly",
    )


def measure_throughput(
    llm: LLM,
    workload: Workload,
    temperatures: Sequence[float],
    *,
    ceilings: Ceilings,
    repeat: int = 1,
    on_row: Callable[[ThroughputRow], None] = lambda row: None,
) -> list[ThroughputRow]:
    """Run the workload `repeat` times at each temperature, after `warm_up`. Nothing else may run in `llm`.

    With `data_parallel_size` the requests go through the front door, which divides them among the engines. Raises
    `ConfigError` if a request does not fit `max_model_len`.
    """
    warm_up(llm, workload, temperatures)
    floor_s = workload_floor(llm, ceilings, workload.lengths, workload.shared_prefix)
    rows = []
    for temperature in temperatures:
        rows.append(
            ThroughputRow(
                temperature=temperature,
                prompt_tokens=sum(map(len, workload.prompts)),
                output_tokens=sum(workload.output_lens),
                floor_s=floor_s,
                runs=tuple(_run(llm, workload, temperature) for _ in range(repeat)),
            )
        )
        on_row(rows[-1])
    return rows


def workload_floor(llm: LLM, ceilings: Ceilings, lengths: Sequence[Lengths], shared_prefix: int = 0) -> float:
    """Return the least seconds that requests of these lengths can take on all engines together."""
    limits = from_engines(llm, _limits)
    max_num_seqs, max_num_batched_tokens = limits[0]
    return workload_floor_seconds(
        from_engines(llm, model_size)[0],
        ceilings,
        lengths,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        shared_prefix=shared_prefix,
        num_engines=len(limits),
    )


def warm_up(llm: LLM, workload: Workload, temperatures: Sequence[float]) -> None:
    """Run the warm-up that `WARM_UP` describes. Raises `ConfigError` if a request does not fit `max_model_len`."""
    longest = max(map(sum, workload.lengths))
    if longest > llm.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and output, does not fit max_model_len={llm.max_model_len}; raise "
            "it, or ask for fewer tokens."
        )
    shortened = [min(output, 1 + i % WARM_UP_LENGTHS) for i, output in enumerate(workload.output_lens)]
    for temperature in temperatures:
        generate(llm, workload, temperature, shortened)


def generate(llm: LLM, workload: Workload, temperature: float, output_lens: Sequence[int] | None = None) -> float:
    """Return the seconds of the workload, with no prefix cached before it."""
    output_lens = workload.output_lens if output_lens is None else output_lens
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    params = [
        SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for output_len in output_lens
    ]
    llm.engine.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == list(output_lens), "outputs that ended early: the figures would be of another workload"
    return seconds


def _limits(holder: Holder) -> tuple[int, int]:
    """Return the most requests and the most tokens of one step of an engine."""
    buffers = holder.runner.step.buffers
    return buffers.max_num_reqs, buffers.max_num_tokens


class _Counts(NamedTuple):
    """What one engine has counted since its start."""

    steps_by_mode: dict[str, int]
    computed_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int


def _counts(holder: Holder) -> _Counts:
    counters, stats = holder.runner.counters, holder.engine.stats
    return _Counts(
        steps_by_mode={mode.value: count for mode, count in counters.by_mode().items()},
        computed_tokens=sum(row.real_tokens for row in counters.rows()),
        prefix_queries=stats.num_prefix_queries,
        prefix_hits=stats.num_prefix_hits,
        preemptions=stats.num_preemptions,
    )


def _run(llm: LLM, workload: Workload, temperature: float) -> ThroughputRun:
    before = from_engines(llm, _counts)
    seconds = generate(llm, workload, temperature)
    after = from_engines(llm, _counts)
    modes: dict[str, int] = {}
    steps_by_engine = []
    for old, new in zip(before, after, strict=True):
        made = {mode: count - old.steps_by_mode.get(mode, 0) for mode, count in new.steps_by_mode.items()}
        steps_by_engine.append(sum(made.values()))
        for mode, count in made.items():
            modes[mode] = modes.get(mode, 0) + count

    def added(name: str) -> int:
        return sum(getattr(new, name) - getattr(old, name) for old, new in zip(before, after, strict=True))

    return ThroughputRun(
        seconds=seconds,
        steps=sum(steps_by_engine),
        steps_by_engine=tuple(steps_by_engine),
        steps_by_mode={mode: count for mode, count in modes.items() if count},
        computed_tokens=added("computed_tokens"),
        prefix_hit_rate=added("prefix_hits") / added("prefix_queries"),
        preemptions=added("preemptions"),
    )
