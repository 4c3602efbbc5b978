"""The table is what the dispatcher does, size by size."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.capture_sizes import (
    full_decode_descriptors,
    full_mixed_descriptors,
    piecewise_descriptors,
)
from piecegraph.runner.cudagraphs.dispatch_table import DispatchRange, decode_ranges, mixed_ranges
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH = ResolvedMode(decode_mode=FULL, mixed_mode=PIECEWISE)


def dispatcher(
    sizes: Sequence[int], max_num_seqs: int, *, resolved: ResolvedMode = BOTH, tokens: int = 1
) -> Dispatcher:
    full = full_decode_descriptors(sizes, max_num_seqs, tokens)
    if resolved.mixed_mode is FULL:
        full += full_mixed_descriptors(sizes, max_num_seqs)
    return Dispatcher(full=full, piecewise=piecewise_descriptors(sizes), resolved=resolved)


def rows(ranges: Sequence[DispatchRange]) -> list[tuple[int, int, str, int | None]]:
    return [(row.first, row.last, row.mode.value, row.num_tokens) for row in ranges]


def test_decode_ranges_follow_the_dispatcher() -> None:
    table = decode_ranges(dispatcher((1, 2, 4, 8), 6), max_num_seqs=6)
    assert rows(table) == [(1, 1, "FULL", 1), (2, 2, "FULL", 2), (3, 4, "FULL", 4), (5, 6, "FULL", 6)]
    assert {row.reason for row in table} == {None}


def test_mixed_ranges_follow_the_dispatcher() -> None:
    table = mixed_ranges(dispatcher((1, 4, 8), 4), max_num_seqs=4, max_num_tokens=10)
    assert rows(table) == [(2, 4, "PIECEWISE", 4), (5, 8, "PIECEWISE", 8), (9, 10, "NONE", None)]
    assert table[-1].reason == "9 tokens are above the largest captured size 8 (PIECEWISE)"


def test_a_batch_that_is_too_large_for_one_mode_falls_to_the_next() -> None:
    table = decode_ranges(dispatcher((1, 2), 9, resolved=BOTH), max_num_seqs=9)
    assert rows(table) == [(1, 1, "FULL", 1), (2, 2, "FULL", 2), (3, 9, "NONE", None)]
    wide = Dispatcher(full=full_decode_descriptors((1, 2), 9), piecewise=[BatchDescriptor(num_tokens=4)], resolved=BOTH)
    assert rows(decode_ranges(wide, max_num_seqs=9))[2:] == [(3, 4, "PIECEWISE", 4), (5, 9, "NONE", None)]


def test_several_tokens_a_request() -> None:
    table = decode_ranges(dispatcher((2, 4, 8), 4, tokens=2), max_num_seqs=4, uniform_token_count=2)
    assert rows(table) == [(1, 1, "FULL", 2), (2, 2, "FULL", 4), (3, 4, "FULL", 8)]


def test_no_range_without_batches() -> None:
    assert mixed_ranges(dispatcher((1,), 1), max_num_seqs=1, max_num_tokens=1) == ()


sizes_strategy = st.sets(st.integers(1, 40), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))


@given(sizes_strategy, st.integers(1, 40), st.sampled_from([BOTH, ResolvedMode(decode_mode=FULL, mixed_mode=FULL)]))
def test_ranges_are_the_dispatcher_size_by_size(
    sizes: tuple[int, ...], max_num_seqs: int, resolved: ResolvedMode
) -> None:
    """Every size is in exactly one range, and runs as the range says."""
    table = dispatcher(sizes, max_num_seqs, resolved=resolved)
    decode = decode_ranges(table, max_num_seqs=max_num_seqs)
    mixed = mixed_ranges(table, max_num_seqs=max_num_seqs, max_num_tokens=50)
    assert [n for row in decode for n in range(row.first, row.last + 1)] == list(range(1, max_num_seqs + 1))
    assert [n for row in mixed for n in range(row.first, row.last + 1)] == list(range(2, 51))
    for ranges, uniform in ((decode, 1), (mixed, None)):
        for row in ranges:
            for n in range(row.first, row.last + 1):
                num_reqs = min(n, max_num_seqs)
                found = table.dispatch(num_tokens=n, num_reqs=num_reqs, uniform_token_count=uniform)
                padded = None if found.mode is NONE else found.descriptor.num_tokens
                assert (row.mode, row.num_tokens, row.reason is None) == (found.mode, padded, found.reason is None)
