"""The time of a step on a layout of GPUs, from measured step times and an alpha-beta model of collectives.

Everything here is pure. `ASSUMPTIONS` says what the model leaves out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASSUMPTIONS = (
    "a step takes the measured time of its tokens on one device, by lines between the measured ones and beyond them",
    "tensor parallelism adds two all-reduces of the hidden states in each layer, one of the embedding and an "
    "all-gather of the logits; nothing overlaps, and sending the schedule to the ranks takes no time",
    "an all-reduce of n bytes among t ranks takes 2 (t - 1) alpha + 2 (t - 1) / t * n / beta (ring), an all-gather "
    "half of that, and a message alpha + n / beta",
    "stages of a pipeline divide all of a step evenly and work at a batch each; the slowest batch sets the pace",
    "engines of data parallelism share nothing, and requests go to them in turn",
    "memory is not modelled: every layout holds the model and the caches of all requests, and none is preempted",
)
"""What the simulation assumes whatever was measured, as sentences to print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs are used."""

    tensor: int
    pipeline: int
    data: int

    @property
    def num_gpus(self) -> int:
        """The GPUs of all ranks."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a model that collectives depend on."""

    num_layers: int
    hidden_bytes: int  # of a token's hidden state
    logits_bytes: int  # of a request's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The alpha-beta model of a connection."""

    alpha_s: float  # of a message of no bytes
    bytes_per_s: float

    @classmethod
    def fitted(cls, sums: Mapping[int, float], num_ranks: int) -> Link:
        """Return the link whose all-reduces among `num_ranks` come closest to `sums`, seconds by bytes.

        The line through them has the least sum of squared relative errors. Raises `ValueError` if there are fewer than
        two sizes, or larger sums do not take longer.
        """
        if len(sums) < 2:
            raise ValueError("a line needs sums of two sizes")
        points = [(num_bytes, seconds, seconds**-2) for num_bytes, seconds in sums.items()]
        total = sum(weight for _, _, weight in points)
        mean_bytes = sum(weight * num_bytes for num_bytes, _, weight in points) / total
        mean_seconds = sum(weight * seconds for _, seconds, weight in points) / total
        slope = sum(weight * (x - mean_bytes) * (y - mean_seconds) for x, y, weight in points)
        slope /= sum(weight * (x - mean_bytes) ** 2 for x, _, weight in points)
        if slope <= 0:
            raise ValueError("larger sums do not take longer")
        messages = 2 * (num_ranks - 1)
        alpha = max(mean_seconds - slope * mean_bytes, 0.0) / messages
        return cls(alpha_s=alpha, bytes_per_s=messages / num_ranks / slope)

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of a message between two ranks."""
        return self.alpha_s + num_bytes / self.bytes_per_s

    def all_gather_s(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-gather whose result has `num_bytes`."""
        return (num_ranks - 1) * (self.alpha_s + num_bytes / num_ranks / self.bytes_per_s)

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce of `num_bytes`: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(num_bytes, num_ranks)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of a step on one device: tokens of a step, ascending, and its seconds."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, num_tokens: float) -> float:
        """Return the seconds of a step of `num_tokens`, on lines through the measured times.

        Below the smallest number of tokens the time is that of the smallest.
        """
        tokens, seconds = self.tokens, self.seconds
        if num_tokens <= tokens[0] or len(tokens) == 1:
            return seconds[0] * max(1.0, num_tokens / tokens[0]) if len(tokens) == 1 else seconds[0]
        place = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
        slope = (seconds[place] - seconds[place - 1]) / (tokens[place] - tokens[place - 1])
        return max(seconds[place - 1] + slope * (num_tokens - tokens[place - 1]), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The times of a step's computation on each of several ranks, collectives left out.

    A step has a part that tensor parallelism divides (linears, heads, the vocabulary) and a part that every rank does
    whole (the host's work, calls of ops, norms). What a rank's share alone takes tells the two apart. If that was not
    measured, ranks are taken to divide all of a step.
    """

    whole: StepTimes
    shard: StepTimes | None = None  # of the share of one of `num_shards` ranks, on one device
    num_shards: int = 2

    def at(self, num_tokens: float, num_ranks: int) -> float:
        """Return the seconds of a step of `num_tokens` on each of `num_ranks` ranks."""
        divided = self.divided(num_tokens)
        return self.whole.at(num_tokens) - divided + divided / num_ranks

    def divided(self, num_tokens: float) -> float:
        """Return the seconds, on one device, of that part of a step that ranks divide."""
        whole = self.whole.at(num_tokens)
        if self.shard is None:
            return whole
        saved = whole - self.shard.at(num_tokens)
        return min(max(saved * self.num_shards / (self.num_shards - 1), 0.0), whole)

    @property
    def assumption(self) -> str:
        """What is assumed of the division, as a sentence to print."""
        if self.shard is None:
            return (
                "tensor parallelism divides all of a step's time evenly, which is too good wherever each rank has work "
                "of its own (the host's, calls of ops, norms): measure that with `piecegraph bench latency --shard-of "
                "2` and give its times as --shard-step-time"
            )
        counts = self.shard.tokens
        parts = ((1e3 * self.whole.at(count), 1e3 * self.divided(count)) for count in counts)
        return (
            "tensor parallelism divides a part of a step's time evenly and leaves the rest whole, by the measured "
            f"times of the share of one of {self.num_shards} ranks; whole remain "
            f"{', '.join(f'{whole - part:.3g} of {whole:.3g}' for whole, part in parts)} ms in steps of "
            f"{', '.join(map(str, counts))} tokens"
        )


def stage_seconds(
    num_tokens: int, num_reqs: int, layout: Layout, times: RankTimes, size: ModelSize, link: Link
) -> float:
    """Return the seconds of a batch in one stage of a pipeline, its message to the next stage included."""
    compute = times.at(num_tokens, layout.tensor)
    if layout.tensor > 1:
        hidden = link.all_reduce_s(num_tokens * size.hidden_bytes, layout.tensor)
        compute += (2 * size.num_layers + 1) * hidden
        compute += link.all_gather_s(num_reqs * size.logits_bytes, layout.tensor)
    if layout.pipeline == 1:
        return compute
    return compute / layout.pipeline + link.message_s(num_tokens * size.hidden_bytes)


def layouts(num_gpus: int, *, most_tensor: int = 8, most_pipeline: int = 8) -> Sequence[Layout]:
    """Return the layouts of `num_gpus`, a power of two, by powers of two of each kind."""
    found = []
    tensor = 1
    while tensor <= min(most_tensor, num_gpus):
        pipeline = 1
        while pipeline <= min(most_pipeline, num_gpus // tensor):
            found.append(Layout(tensor=tensor, pipeline=pipeline, data=num_gpus // tensor // pipeline))
            pipeline *= 2
        tensor *= 2
    return found
