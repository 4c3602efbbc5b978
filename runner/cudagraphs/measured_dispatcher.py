"""The dispatcher by cost: of all that can run a batch it takes what was measured to take the least time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.dispatcher import MODE_RANK, Agree, Dispatched, Dispatcher
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

MIN_GAIN = 0.05
"""The smallest gain that counts: something else must take this share less time than the smallest graph that holds a
batch. Otherwise noise in the measurements would make two starts of the same model differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChoice:
    """Batches of `first` to `last` tokens, for which something else is cheaper than the smallest graph that fits."""

    uniform_token_count: int | None  # tokens of each request; None: any other batch
    first: int
    last: int
    taken: Dispatched  # without a graph, its descriptor is that of a batch of `last` tokens
    seconds: float
    instead_of: Dispatched
    instead_of_seconds: float


class MeasuredDispatcher(Dispatcher):
    """A dispatcher whose table was made from measured times; what was not measured is dispatched as by `Dispatcher`.

    For data-parallel ranks that agree on each batch the times are not read, because those of other ranks differ.
    """

    def __init__(
        self,
        *,
        full: Iterable[BatchDescriptor],
        piecewise: Iterable[BatchDescriptor],
        resolved: ResolvedMode,
        times: MeasuredTimes,
        failed: Mapping[tuple[CUDAGraphMode, BatchDescriptor], str] | None = None,
        static_sizes: Collection[int] = (),
    ) -> None:
        """Make the table. `times`: of the captured descriptors; the other arguments are those of `Dispatcher`."""
        full, piecewise = tuple(full), tuple(piecewise)
        super().__init__(full=full, piecewise=piecewise, resolved=resolved, failed=failed, static_sizes=static_sizes)
        kinds = {one.uniform_token_count for one in full} | {None, 1}
        wanted = {kind: resolved.mixed_mode if kind is None else resolved.decode_mode for kind in kinds}
        self.choices = tuple(
            choice
            for kind in sorted(kinds, key=lambda kind: kind or 0)
            for choice in cost_choices(full, piecewise, uniform_token_count=kind, wanted=wanted[kind], times=times)
        )
        """The batches for which the table differs from the smallest graph that fits, ascending for each kind."""
        self._chosen = {kind: _Lookup([c for c in self.choices if c.uniform_token_count == kind]) for kind in kinds}
        self._other = self._chosen[None]

    def dispatch(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        agree: Agree | None = None,
        at_most: CUDAGraphMode = FULL,
    ) -> Dispatched:
        """Return what takes the least time for a batch, as far as it was measured.

        If cost alone makes the mode lower than the configured one, the result has a reason, and `is_cheaper` is True.
        The arguments are those of `Dispatcher.dispatch`.
        """
        if agree is None and at_most is FULL and not num_active_loras:
            choice = self._chosen.get(uniform_token_count, self._other).find(num_tokens, num_reqs)
            if choice is not None:
                if choice.mode is not NONE:
                    return choice
                descriptor = BatchDescriptor(
                    num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=uniform_token_count
                )
                return choice._replace(descriptor=descriptor)
        return super().dispatch(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=uniform_token_count,
            num_active_loras=num_active_loras,
            agree=agree,
            at_most=at_most,
        )

    @property
    def irregular_up_to(self) -> int:
        """The largest number of tokens whose dispatch was decided by cost; 0: none."""
        return max((choice.last for choice in self.choices), default=0)


def cost_choices(
    full: Sequence[BatchDescriptor],
    piecewise: Sequence[BatchDescriptor],
    *,
    uniform_token_count: int | None,
    wanted: CUDAGraphMode,
    times: MeasuredTimes,
) -> list[CostChoice]:
    """Return the ranges of batches for which something measured is cheaper than the smallest graph that fits.

    `full`, `piecewise`: the captured descriptors. `uniform_token_count`: the kind of batch: the tokens of each of its
    requests, or None for batches that are not uniform. `wanted`: the mode that such batches are meant to run under. A
    batch for which the smallest graph that fits was not measured is in no range.
    """
    by_mode = (
        [(FULL, one) for one in full if one.uniform_token_count == uniform_token_count is not None],
        [(FULL, one) for one in full if one.uniform_token_count is None],
        [(PIECEWISE, one) for one in piecewise],
    )
    tables = [
        sorted((each for each in table if not each[1].num_active_loras), key=lambda each: each[1].num_tokens)
        for table in by_mode
    ]
    choices: list[CostChoice] = []
    first = 1
    for size in sorted({one.num_tokens for table in tables for _, one in table}):
        fitting = [[each for each in table if each[1].num_tokens >= size] for table in tables]
        smallest = next(table[0] for table in fitting if table)  # of the highest mode, as without times
        choices += [
            _choice(uniform_token_count, low, high, taken, smallest, wanted, times)
            for low, high, taken in _cheaper(
                smallest, [each for table in fitting for each in table], first, size, times
            )
        ]
        first = size + 1
    return choices


_Graph = tuple[CUDAGraphMode, BatchDescriptor]


def _cheaper(
    smallest: _Graph, fitting: Sequence[_Graph], first: int, last: int, times: MeasuredTimes
) -> Iterator[tuple[int, int, _Graph | None]]:
    """Divide the batches of `first` to `last` tokens, and yield each range that `smallest` is not the cheapest for.

    A range is its first and last number of tokens, and the graph among `fitting` that is the cheapest; None: no graph.
    """
    seconds = times.graphs.get(smallest)
    if seconds is None:
        return
    best = min((each for each in fitting if each in times.graphs), key=lambda each: times.graphs[each])
    if times.graphs[best] > seconds * (1 - MIN_GAIN):
        best = smallest
    most = times.graphs[best] * (1 - MIN_GAIN)

    def needs_graph(num_tokens: int) -> bool:
        uncaptured = times.uncaptured_seconds(num_tokens)
        return uncaptured is None or uncaptured > most

    num_uncaptured = bisect_left(range(first, last + 1), True, key=needs_graph)
    if num_uncaptured:
        yield first, first + num_uncaptured - 1, None
    if best != smallest and first + num_uncaptured <= last:
        yield first + num_uncaptured, last, best


def _choice(
    uniform_token_count: int | None,
    first: int,
    last: int,
    taken: _Graph | None,
    smallest: _Graph,
    wanted: CUDAGraphMode,
    times: MeasuredTimes,
) -> CostChoice:
    instead_of, instead_of_seconds = Dispatched(*smallest, None), times.graphs[smallest]
    if taken is None:
        mode, descriptor, seconds = NONE, BatchDescriptor(num_tokens=last), times.uncaptured_seconds(last)
        assert seconds is not None, "it was compared"
    else:
        (mode, descriptor), seconds = taken, times.graphs[taken]
    reason = None
    if MODE_RANK[mode] < MODE_RANK[wanted]:
        what = f"{smallest[0].value} for {smallest[1].num_tokens} tokens"
        reason = f"measured: {what} took {instead_of_seconds * 1e3:.3g} ms, and this {seconds * 1e3:.3g} ms"
    is_cheaper = MODE_RANK[smallest[0]] >= MODE_RANK[wanted]
    return CostChoice(
        uniform_token_count=uniform_token_count,
        first=first,
        last=last,
        taken=Dispatched(mode, descriptor, reason, is_cheaper),
        seconds=seconds,
        instead_of=instead_of,
        instead_of_seconds=instead_of_seconds,
    )


class _Lookup:
    """The choices of one kind of batch, found by the number of tokens."""

    __slots__ = ("_choices", "_lasts")

    def __init__(self, choices: Sequence[CostChoice]) -> None:
        self._lasts = [choice.last for choice in choices]
        self._choices = [(choice.first, choice.taken.descriptor.num_reqs, choice.taken) for choice in choices]

    def find(self, num_tokens: int, num_reqs: int) -> Dispatched | None:
        at = bisect_left(self._lasts, num_tokens)
        if at == len(self._lasts):
            return None
        first, max_reqs, taken = self._choices[at]
        return taken if first <= num_tokens and (max_reqs is None or max_reqs >= num_reqs) else None
