"""A readable table of a dispatcher's decisions for all batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.dispatcher import Dispatched, Dispatcher

_ORDER = {CUDAGraphMode.FULL: 0, CUDAGraphMode.PIECEWISE: 1, CUDAGraphMode.NONE: 2}
"""The order of modes as batches grow. It never reverses, because a graph that holds a batch holds smaller ones."""


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

    return _ranges(dispatch, 1, max_num_seqs)


def mixed_ranges(dispatcher: Dispatcher, *, max_num_seqs: int, max_num_tokens: int) -> tuple[DispatchRange, ...]:
    """Return the ranges of all other batches, from 2 (one token is a decode) to `max_num_tokens` tokens.

    Each batch has as many requests as possible.
    """

    def dispatch(num_tokens: int) -> Dispatched:
        return dispatcher.dispatch(
            num_tokens=num_tokens, num_reqs=min(num_tokens, max_num_seqs), uniform_token_count=None
        )

    return _ranges(dispatch, 2, max_num_tokens)


def _ranges(dispatch: Callable[[int], Dispatched], first: int, last: int) -> tuple[DispatchRange, ...]:
    """Return the ranges from `first` to `last`, found by binary search instead of one dispatch per size."""

    def order(size: int) -> tuple[int, int]:
        found = dispatch(size)
        return _ORDER[found.mode], 0 if found.mode is CUDAGraphMode.NONE else found.descriptor.num_tokens

    ranges: list[DispatchRange] = []
    while first <= last:
        alike = bisect_right(range(first, last + 1), order(first), key=order)
        found = dispatch(first)
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
