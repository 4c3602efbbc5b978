"""A readable table of a dispatcher's decisions for all batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.dispatcher import Dispatched, Dispatcher
from piecegraph.runner.cudagraphs.measured_dispatcher import MeasuredDispatcher

_ORDER = {CUDAGraphMode.FULL: 0, CUDAGraphMode.PIECEWISE: 1, CUDAGraphMode.NONE: 2}
"""The order of modes as batches grow. It reverses only where costs decide (`MeasuredDispatcher`), because a graph that
holds a batch holds smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRange:
    """A range of batches, `first` to `last`, that run under the same mode and padded size."""

    first: int  # requests of a decode batch, tokens of any other batch
    last: int
    mode: CUDAGraphMode
    num_tokens: int | None  # the padded size; None: no padding
    reason: str | None  # for a downgrade: the reason given for batch `first`


def decode_ranges(
    dispatcher: Dispatcher, *, max_num_seqs: int, uniform_token_count: int = 1
) -> tuple[DispatchRange, ...]:
    """Return the ranges of 1 to `max_num_seqs` requests that decode `uniform_token_count` tokens each."""

    def dispatch(num_reqs: int) -> Dispatched:
        return dispatcher.dispatch(
            num_tokens=num_reqs * uniform_token_count, num_reqs=num_reqs, uniform_token_count=uniform_token_count
        )

    return _ranges(dispatch, 1, max_num_seqs, irregular_up_to=_irregular_up_to(dispatcher))


def mixed_ranges(dispatcher: Dispatcher, *, max_num_seqs: int, max_num_tokens: int) -> tuple[DispatchRange, ...]:
    """Return the ranges of all other batches, from 2 (one token is a decode) to `max_num_tokens` tokens.

    Each batch has as many requests as possible.
    """

    def dispatch(num_tokens: int) -> Dispatched:
        return dispatcher.dispatch(
            num_tokens=num_tokens, num_reqs=min(num_tokens, max_num_seqs), uniform_token_count=None
        )

    return _ranges(dispatch, 2, max_num_tokens, irregular_up_to=_irregular_up_to(dispatcher))


def _irregular_up_to(dispatcher: Dispatcher) -> int:
    return dispatcher.irregular_up_to if isinstance(dispatcher, MeasuredDispatcher) else 0


def _ranges(
    dispatch: Callable[[int], Dispatched], first: int, last: int, *, irregular_up_to: int
) -> tuple[DispatchRange, ...]:
    """Return the ranges from `first` to `last`, found by binary search instead of one dispatch per size.

    Sizes up to `irregular_up_to` are dispatched one by one.
    """

    def order(size: int) -> tuple[int, int, str | None]:
        found = dispatch(size)
        padded = 0 if found.mode is CUDAGraphMode.NONE else found.descriptor.num_tokens
        return _ORDER[found.mode], padded, found.reason if found.is_cheaper else None

    def num_alike(first: int) -> int:
        if first > irregular_up_to:
            return bisect_right(range(first, last + 1), order(first)[:2], key=lambda size: order(size)[:2])
        return next((size for size in range(first + 1, last + 1) if order(size) != order(first)), last + 1) - first

    ranges: list[DispatchRange] = []
    while first <= last:
        alike, found = num_alike(first), dispatch(first)
        is_padded = found.mode is not CUDAGraphMode.NONE
        ranges.append(
            DispatchRange(
                first=first,
                last=first + alike - 1,
                mode=found.mode,
                num_tokens=found.descriptor.num_tokens if is_padded else None,
                reason=found.reason,
            )
        )
        first += alike
    return tuple(ranges)
