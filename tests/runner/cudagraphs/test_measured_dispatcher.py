"""Dispatch by cost takes what was measured to be cheaper, also where that is not the smallest graph that fits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import GraphNotCaptured
from piecegraph.runner.cudagraphs.capture_sizes import full_decode_descriptors, piecewise_descriptors
from piecegraph.runner.cudagraphs.dispatch_counters import refuse_downgrade
from piecegraph.runner.cudagraphs.dispatch_table import decode_ranges, mixed_ranges
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.measured_dispatcher import MIN_GAIN, MeasuredDispatcher
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH = ResolvedMode(decode_mode=FULL, mixed_mode=PIECEWISE)
SIZES = (1, 4, 8, 16)
MAX_SEQS = 16


def times(
    full: Mapping[int, float], piecewise: Mapping[int, float], uncaptured: Mapping[int, float] | None = None
) -> MeasuredTimes:
    """Milliseconds of decode graphs, of PIECEWISE graphs and of steps without graphs, by number of tokens."""
    graphs: dict[tuple[CUDAGraphMode, BatchDescriptor], float] = {}
    for size, ms in full.items():
        graphs[FULL, BatchDescriptor(num_tokens=size, num_reqs=size, uniform_token_count=1)] = ms / 1e3
    for size, ms in piecewise.items():
        graphs[PIECEWISE, BatchDescriptor(num_tokens=size)] = ms / 1e3
    return MeasuredTimes(graphs, {size: ms / 1e3 for size, ms in (uncaptured or {}).items()})


def dispatcher(measured: MeasuredTimes) -> MeasuredDispatcher:
    full, piecewise = full_decode_descriptors(SIZES, MAX_SEQS), piecewise_descriptors(SIZES)
    return MeasuredDispatcher(full=full, piecewise=piecewise, resolved=BOTH, times=measured)


def decode(table: Dispatcher, num_reqs: int) -> tuple[CUDAGraphMode, int]:
    found = table.dispatch(num_tokens=num_reqs, num_reqs=num_reqs, uniform_token_count=1)
    return found.mode, found.descriptor.num_tokens


def mixed(table: Dispatcher, num_tokens: int) -> tuple[CUDAGraphMode, int]:
    found = table.dispatch(num_tokens=num_tokens, num_reqs=1, uniform_token_count=None)
    return found.mode, found.descriptor.num_tokens


def test_a_larger_graph_that_is_cheaper_is_taken() -> None:
    """The answer differs from the smallest graph that fits: 4 requests run under the graph of 8."""
    table = dispatcher(times({1: 1, 4: 3, 8: 2, 16: 4}, {1: 2, 4: 4, 8: 5, 16: 6}))
    assert [decode(table, n) for n in (1, 2, 4, 5, 9)] == [(FULL, 1), (FULL, 8), (FULL, 8), (FULL, 8), (FULL, 16)]
    assert mixed(table, 3) == (PIECEWISE, 4)
    (choice,) = table.choices
    assert (choice.first, choice.last, choice.seconds, choice.instead_of_seconds) == (2, 4, 0.002, 0.003)
    assert choice.instead_of.descriptor.num_tokens == 4


def test_another_mode_that_is_cheaper_is_taken_and_says_so() -> None:
    """PIECEWISE instead of FULL is no downgrade for `strict`, because nothing that was asked for is missing."""
    table = dispatcher(times({1: 1, 4: 3, 8: 9, 16: 10}, {1: 2, 4: 4, 8: 5, 16: 11}))
    found = table.dispatch(num_tokens=6, num_reqs=6, uniform_token_count=1)
    assert (found.mode, found.descriptor) == (PIECEWISE, BatchDescriptor(num_tokens=8))
    assert found.reason == "measured: FULL for 8 tokens took 9 ms, and this 5 ms" and found.is_cheaper
    refuse_downgrade(found, strict=True)


def test_no_graph_is_taken_where_it_beats_padding() -> None:
    """Without graphs 5 tokens take 3 ms and 8 take 6; the graph of 8 takes 5 ms."""
    table = dispatcher(times({}, {1: 1, 4: 2, 8: 5, 16: 20}, {4: 2, 8: 6}))
    assert [mixed(table, n) for n in (4, 5, 6, 7, 8)] == [
        (PIECEWISE, 4), (NONE, 5), (NONE, 6), (PIECEWISE, 8), (PIECEWISE, 8),
    ]  # fmt: skip
    found = table.dispatch(num_tokens=6, num_reqs=2, uniform_token_count=None)
    assert found.descriptor == BatchDescriptor(num_tokens=6, num_reqs=2)
    assert found.reason == "measured: PIECEWISE for 8 tokens took 5 ms, and this 4 ms"


def test_a_gain_within_the_noise_changes_nothing() -> None:
    barely = 1 - MIN_GAIN / 2
    table = dispatcher(times({1: 1, 4: 3, 8: 3 * barely, 16: 4}, {4: 3 * barely}, {4: 3 * barely}))
    assert table.choices == () and decode(table, 4) == (FULL, 4)


def test_what_was_not_measured_is_dispatched_by_size() -> None:
    """A graph without a time is taken where it is the smallest that fits, and for no other batch."""
    table = dispatcher(times({1: 9, 8: 1}, {}))
    assert [decode(table, n) for n in (1, 3, 8, 9)] == [(FULL, 8), (FULL, 4), (FULL, 8), (FULL, 16)]


def test_a_batch_that_lost_its_graph_is_a_downgrade_all_the_same() -> None:
    """FULL holds up to 4 requests; 6 run PIECEWISE, which stays a downgrade when a larger bucket is cheaper."""
    table = MeasuredDispatcher(
        full=full_decode_descriptors((1, 4), 4),
        piecewise=piecewise_descriptors(SIZES),
        resolved=BOTH,
        times=times({1: 1, 4: 2}, {1: 5, 4: 5, 8: 5, 16: 4}),
    )
    found = table.dispatch(num_tokens=6, num_reqs=6, uniform_token_count=1)
    assert (found.mode, found.descriptor.num_tokens, found.is_cheaper) == (PIECEWISE, 16, False)
    with pytest.raises(GraphNotCaptured, match="strict=True"):
        refuse_downgrade(found, strict=True)


def test_a_forced_mode_an_adapter_and_agreeing_ranks_ignore_the_times() -> None:
    table = dispatcher(times({1: 1, 4: 9, 8: 2, 16: 4}, {}))
    forced = table.dispatch(num_tokens=4, num_reqs=4, uniform_token_count=1, at_most=PIECEWISE)
    assert (forced.mode, forced.descriptor.num_tokens) == (PIECEWISE, 4)
    agreed = table.dispatch(num_tokens=4, num_reqs=4, uniform_token_count=1, agree=lambda mode, size: (mode, size))
    assert (agreed.mode, agreed.descriptor.num_tokens) == (FULL, 4)
    adapted = table.dispatch(num_tokens=4, num_reqs=4, uniform_token_count=1, num_active_loras=2)
    assert adapted.mode is NONE


milliseconds = st.integers(1, 30).map(float)
by_size = st.fixed_dictionaries({}, optional=dict.fromkeys(SIZES, milliseconds))


@given(by_size, by_size, by_size)
def test_every_batch_runs_in_the_least_measured_time(
    full: dict[int, float], piecewise: dict[int, float], uncaptured: dict[int, float]
) -> None:
    """The choice holds the batch, and nothing measured is cheaper by more than the margin; ranges say the same."""
    measured = times(full, piecewise, uncaptured)
    table = dispatcher(measured)
    plain = Dispatcher(
        full=full_decode_descriptors(SIZES, MAX_SEQS), piecewise=piecewise_descriptors(SIZES), resolved=BOTH
    )
    for num_tokens in range(1, SIZES[-1] + 1):
        for uniform, num_reqs in ((1, num_tokens), (None, 1)):
            found = table.dispatch(num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=uniform)
            smallest = plain.dispatch(num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=uniform)
            seconds = measured.graphs.get((smallest.mode, smallest.descriptor))
            if seconds is None:
                assert found == smallest
                continue
            assert found.mode is NONE or found.descriptor.num_tokens >= num_tokens
            others = [
                other
                for (mode, one), other in measured.graphs.items()
                if one.num_tokens >= num_tokens and (mode is PIECEWISE or uniform == 1)
            ]
            without = measured.uncaptured_seconds(num_tokens)
            least = min([*others, *([] if without is None else [without])])
            took = without if found.mode is NONE else measured.graphs[found.mode, found.descriptor]
            assert took is not None and took <= seconds and least >= took * (1 - MIN_GAIN) ** 2 - 1e-12
    for ranges, uniform in (
        (decode_ranges(table, max_num_seqs=MAX_SEQS), 1),
        (mixed_ranges(table, max_num_seqs=1, max_num_tokens=20), None),
    ):
        for row in ranges:
            for n in range(row.first, row.last + 1):
                found = table.dispatch(num_tokens=n, num_reqs=n if uniform else 1, uniform_token_count=uniform)
                padded = None if found.mode is NONE else found.descriptor.num_tokens
                assert (row.mode, row.num_tokens, row.reason is None) == (found.mode, padded, found.reason is None)
