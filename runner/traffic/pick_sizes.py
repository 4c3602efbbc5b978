"""The choice of the sizes to capture that cost least for a histogram of batch shapes, by dynamic programming."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes

FIXED_TOKENS = 64
"""The fixed part of a step's time in the linear model, as the number of tokens that take as long. The model is used if
nothing was measured; it changes the savings that are shown, and not which sizes are chosen."""

EXACT_UP_TO = 32
"""Every number of tokens up to this one is a candidate. Above it there are 16 candidates between two powers of two, so
that a choice is made in a fraction of a second."""

Seconds = Callable[[int], float]
"""The seconds of a step by its padded number of tokens; they do not decrease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Steps by shape, before padding, of an engine of at most `max_num_seqs` requests and `max_num_tokens` tokens."""

    decode: Mapping[int, int]  # requests of a decode batch -> steps
    mixed: Mapping[int, int]  # tokens of any other batch -> steps
    max_num_seqs: int
    max_num_tokens: int

    @property
    def num_steps(self) -> int:
        """The number of steps of both kinds."""
        return sum(self.decode.values()) + sum(self.mixed.values())

    def clipped(self) -> Histogram:
        """Return the histogram with batches that are too large for the engine counted as the largest it runs."""
        decode, mixed = Counter[int](), Counter[int]()
        for size, count in self.decode.items():
            decode[min(size, self.max_num_seqs)] += count
        for size, count in self.mixed.items():
            mixed[min(size, self.max_num_tokens)] += count
        return Histogram(decode=decode, mixed=mixed, max_num_seqs=self.max_num_seqs, max_num_tokens=self.max_num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The seconds of decode batches and of other batches under a graph; without measured times, in tokens."""

    decode: Seconds
    mixed: Seconds
    is_measured: bool


def cost_model(times: MeasuredTimes) -> CostModel:
    """Return the model of measured graphs, or, where fewer than two were measured, a linear one.

    The times of one mode stand for the other if only one was measured.
    """
    decode, mixed = {}, {}
    for (mode, one), seconds in times.graphs.items():
        if one.uniform_token_count == 1:
            decode[one.num_tokens] = seconds
        elif one.uniform_token_count is None and (mode is CUDAGraphMode.PIECEWISE or one.num_tokens not in mixed):
            mixed[one.num_tokens] = seconds
    decode, mixed = (decode if len(decode) > 1 else mixed), (mixed if len(mixed) > 1 else decode)
    if len(decode) < 2 or len(mixed) < 2:
        return CostModel(decode=_linear, mixed=_linear, is_measured=False)
    return CostModel(decode=_interpolated(decode), mixed=_interpolated(mixed), is_measured=True)


def pick_sizes(histogram: Histogram, *, count: int, model: CostModel) -> tuple[int, ...]:
    """Return at most `count` sizes, ascending, under which the steps of `histogram` cost least.

    The largest is always `max_num_tokens`, so that every batch has a graph. Besides these sizes, decode batches have
    one for `max_num_seqs` requests (`full_decode_descriptors`), which is taken into account.
    """
    histogram = histogram.clipped()
    top = histogram.max_num_tokens
    shapes = {*histogram.decode, *histogram.mixed}
    candidates = sorted({min(_rounded_up(shape), top) for shape in shapes} | {top})
    decode_below, mixed_below = ([0] + [_steps_up_to(steps, size) for size in candidates] for steps in
                                 (histogram.decode, histogram.mixed))  # fmt: skip
    decode_seconds = [model.decode(min(size, histogram.max_num_seqs)) for size in candidates]
    mixed_seconds = [model.mixed(size) for size in candidates]

    def cost(first: int, last: int) -> float:
        """Return the seconds of the batches above candidate `first - 1`, padded to candidate `last`."""
        num_decode, num_mixed = (below[last + 1] - below[first] for below in (decode_below, mixed_below))
        return num_decode * decode_seconds[last] + num_mixed * mixed_seconds[last]

    # best[j]: the least cost of all batches up to candidate j with the sizes allowed so far, the largest of them j
    best = [cost(0, j) for j in range(len(candidates))]
    chosen = [[j] for j in range(len(candidates))]
    for _ in range(min(count, len(candidates)) - 1):
        following = [
            min((best[i] + cost(i + 1, j), i) for i in range(j)) if j else (best[0], -1) for j in range(len(best))
        ]
        chosen = [
            [*chosen[i], j] if i >= 0 and total < best[j] else chosen[j] for j, (total, i) in enumerate(following)
        ]
        best = [min(total, old) for (total, _), old in zip(following, best, strict=True)]
    return tuple(candidates[j] for j in chosen[-1])


def total_cost(
    histogram: Histogram, sizes: Sequence[int], model: CostModel, mixed_sizes: Sequence[int] | None = None
) -> float:
    """Return what the steps of `histogram` cost if `sizes`, ascending, are captured.

    `mixed_sizes` are those of batches that are no uniform decode; the default is `sizes`. The unit is the model's. A
    batch above the largest size counts as if it were padded to `max_num_tokens`.
    """
    histogram = histogram.clipped()
    top, seqs = histogram.max_num_tokens, histogram.max_num_seqs
    decode_sizes = [size for size in sorted({*sizes, top}) if size < seqs] + [seqs]
    mixed_sizes = sorted({*(sizes if mixed_sizes is None else mixed_sizes), top})
    decode = (n * model.decode(decode_sizes[bisect_left(decode_sizes, size)]) for size, n in histogram.decode.items())
    mixed = (n * model.mixed(mixed_sizes[bisect_left(mixed_sizes, size)]) for size, n in histogram.mixed.items())
    return sum(decode) + sum(mixed)


def _steps_up_to(steps: Mapping[int, int], size: int) -> int:
    return sum(count for shape, count in steps.items() if shape <= size)


def _rounded_up(size: int) -> int:
    """Return the candidate that holds `size` tokens."""
    if size <= EXACT_UP_TO:
        return size
    unit = (1 << ((size - 1).bit_length() - 1)) // 16
    return -(-size // unit) * unit


def _linear(num_tokens: int) -> float:
    return float(FIXED_TOKENS + num_tokens)


def _interpolated(points: Mapping[int, float]) -> Seconds:
    """Return the function through these points, with a constant before the first, made not to decrease.

    Beyond the last point it goes on as between the first and the last.
    """
    sizes = sorted(points)
    seconds = [max(points[below] for below in sizes[: i + 1]) for i in range(len(sizes))]
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])

    def at(num_tokens: int) -> float:
        i = bisect_left(sizes, num_tokens)
        if i == 0:
            return seconds[0]
        if i == len(sizes):
            return seconds[-1] + slope * (num_tokens - sizes[-1])
        share = (num_tokens - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    return at
