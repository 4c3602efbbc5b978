"""A batch finds the smallest captured descriptor that holds it, in the best mode; a slower way has a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import GraphNotCaptured
from piecegraph.runner.cudagraphs.capture_sizes import (
    full_decode_descriptors,
    full_mixed_descriptors,
    piecewise_descriptors,
)
from piecegraph.runner.cudagraphs.dispatch_counters import DispatchCounters, refuse_downgrade
from piecegraph.runner.cudagraphs.dispatcher import Dispatched, Dispatcher, uniform_token_count
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH = ResolvedMode(decode_mode=FULL, mixed_mode=PIECEWISE)
SIZES = (1, 2, 4, 8, 16, 32)


def dispatcher(sizes: Sequence[int] = SIZES, max_num_seqs: int = 8) -> Dispatcher:
    full, piecewise = full_decode_descriptors(sizes, max_num_seqs), piecewise_descriptors(sizes)
    return Dispatcher(full=full, piecewise=piecewise, resolved=BOTH)


def decode(num_reqs: int, tokens: int = 1) -> dict[str, Any]:
    return {"num_tokens": num_reqs * tokens, "num_reqs": num_reqs, "uniform_token_count": tokens}


def test_decode_runs_full_and_other_batches_piecewise() -> None:
    table = dispatcher()
    full = BatchDescriptor(num_tokens=4, num_reqs=4, uniform_token_count=1)
    assert table.dispatch(**decode(3)) == Dispatched(FULL, full, None)
    mixed = table.dispatch(num_tokens=9, num_reqs=3, uniform_token_count=None)
    assert mixed == Dispatched(PIECEWISE, BatchDescriptor(num_tokens=16), None)


def test_prompts_of_equal_length_are_not_a_decode_batch() -> None:
    """The batch is uniform, but FULL is not captured for three tokens per request, so it runs PIECEWISE."""
    assert dispatcher().dispatch(**decode(2, tokens=3)) == Dispatched(PIECEWISE, BatchDescriptor(num_tokens=8), None)


def test_speculative_decode_has_graphs_of_its_own() -> None:
    table = Dispatcher(full=full_decode_descriptors(SIZES, 8, 2), piecewise=(), resolved=BOTH)
    assert table.dispatch(**decode(3, tokens=2)).descriptor.num_reqs == 4
    assert table.dispatch(**decode(3)).mode is NONE


def test_every_downgrade_has_a_reason() -> None:
    table = dispatcher()
    nine = table.dispatch(**decode(9))
    assert (nine.mode, nine.reason) == (PIECEWISE, "9 tokens are above the largest captured size 8 (FULL)")
    large = table.dispatch(num_tokens=33, num_reqs=2, uniform_token_count=None)
    assert (large.mode, large.reason) == (NONE, "33 tokens are above the largest captured size 32 (PIECEWISE)")
    assert large.descriptor == BatchDescriptor(num_tokens=33, num_reqs=2)
    forced = table.dispatch(**decode(1), at_most=PIECEWISE)
    assert (forced.mode, forced.reason) == (PIECEWISE, "no mode above PIECEWISE was allowed for this batch")
    lora = table.dispatch(**decode(1), num_active_loras=2)
    assert (lora.mode, lora.reason) == (NONE, "no FULL graph was captured for such batches with 2 active LoRAs")


def test_a_failed_capture_is_the_reason() -> None:
    failed = {(PIECEWISE, BatchDescriptor(num_tokens=32)): "OutOfMemoryError: none left"}
    table = Dispatcher(full=(), piecewise=piecewise_descriptors((1, 16)), resolved=BOTH, failed=failed)
    found = table.dispatch(num_tokens=20, num_reqs=2, uniform_token_count=None)
    assert (found.mode, found.reason) == (NONE, "capturing PIECEWISE for 32 tokens failed: OutOfMemoryError: none left")


def test_a_failed_capture_of_another_kind_of_batch_is_no_reason() -> None:
    """Too few requests, other LoRAs, or a uniform decode when the batch is none."""
    failed = {
        (FULL, BatchDescriptor(num_tokens=16, num_reqs=2, uniform_token_count=8)): "one",
        (FULL, BatchDescriptor(num_tokens=16, num_reqs=2)): "two",
        (FULL, BatchDescriptor(num_tokens=16, num_reqs=16, uniform_token_count=1, num_active_loras=1)): "three",
    }
    table = Dispatcher(full=full_decode_descriptors(SIZES, 8), piecewise=(), resolved=BOTH, failed=failed)
    assert table.dispatch(**decode(9)).reason == "9 tokens are above the largest captured size 8 (FULL)"


def test_full_for_any_batch_holds_tokens_and_requests() -> None:
    resolved = ResolvedMode(decode_mode=FULL, mixed_mode=FULL)
    table = Dispatcher(full=full_mixed_descriptors(SIZES, 4), piecewise=(), resolved=resolved)
    found = table.dispatch(num_tokens=5, num_reqs=3, uniform_token_count=None)
    assert found == Dispatched(FULL, BatchDescriptor(num_tokens=8, num_reqs=4), None)
    crowded = table.dispatch(num_tokens=5, num_reqs=5, uniform_token_count=None)
    assert (crowded.mode, crowded.reason) == (NONE, "no FULL graph holds 5 requests in 5 tokens")


def test_engines_agree_on_a_padding_and_each_runs_its_highest_mode_for_it() -> None:
    """Engines that share experts: one that runs eagerly does not take the others' graphs from them."""
    table = dispatcher()
    lower = table.dispatch(**decode(3), agree=lambda mode, padded: (PIECEWISE, 16))
    assert (lower.mode, lower.descriptor) == (PIECEWISE, BatchDescriptor(num_tokens=16))
    assert lower.reason == "engines agreed on 16 tokens; this one proposed FULL with 4"
    wider = table.dispatch(**decode(3), agree=lambda mode, padded: (FULL, 8))
    assert (wider.mode, wider.descriptor.num_reqs, wider.reason) == (FULL, 8, None)
    same = table.dispatch(**decode(3), agree=lambda mode, padded: (mode, padded))
    assert same == table.dispatch(**decode(3))
    # A rank that proposes NONE proposes a captured size, so that the others have a graph of that padding.
    proposals = []

    def agree(mode: CUDAGraphMode, padded: int) -> tuple[CUDAGraphMode, int]:
        proposals.append((mode, padded))
        return mode, padded

    eager = table.dispatch(**decode(3), at_most=NONE, agree=agree)
    assert (eager.mode, eager.descriptor.num_tokens, proposals) == (NONE, 4, [(NONE, 4)])
    assert table.padded_to(8, num_reqs=0, uniform_token_count=1).mode is FULL
    assert table.padded_to(16, num_reqs=0, uniform_token_count=1).mode is PIECEWISE
    without = table.padded_to(17, num_reqs=0, uniform_token_count=1)
    assert (without.mode, without.descriptor.num_tokens) == (NONE, 17)


sizes_strategy = st.sets(st.integers(1, 64), min_size=1, max_size=8).map(lambda found: tuple(sorted(found)))


@given(sizes_strategy, st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=24))
def test_the_table_equals_a_search_of_everything_captured(
    sizes: tuple[int, ...], max_num_seqs: int, query_lens: list[int]
) -> None:
    """The descriptor holds the batch, no smaller one would, FULL comes first, and NONE has a reason."""
    full, piecewise = full_decode_descriptors(sizes, max_num_seqs), piecewise_descriptors(sizes)
    num_tokens, num_reqs, uniform = sum(query_lens), len(query_lens), uniform_token_count(query_lens)
    found = Dispatcher(full=full, piecewise=piecewise, resolved=BOTH).dispatch(
        num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=uniform
    )
    fitting = [d for d in full if d.uniform_token_count == uniform and (d.num_reqs or 0) >= num_reqs]
    partly = [d for d in piecewise if d.num_tokens >= num_tokens]
    if fitting:
        assert (found.mode, found.descriptor) == (FULL, min(fitting, key=lambda d: d.num_tokens))
    elif partly:
        assert (found.mode, found.descriptor) == (PIECEWISE, min(partly, key=lambda d: d.num_tokens))
    else:
        assert found.mode is NONE and found.descriptor.num_tokens == num_tokens and found.reason
    assert (found.reason is None) == (found.mode is (FULL if uniform == 1 else PIECEWISE))


def test_counters_count_modes_sizes_and_reasons() -> None:
    counters, table = DispatchCounters(), dispatcher()
    for num_reqs in (1, 3, 3, 4):
        counters.record(table.dispatch(**decode(num_reqs)), num_reqs)
    counters.record(table.dispatch(num_tokens=40, num_reqs=1, uniform_token_count=None), 40)
    first, *_ = counters.rows()
    assert (first.mode, first.num_tokens, first.batches, first.real_tokens, first.padded_tokens) == (FULL, 4, 3, 10, 12)
    assert counters.by_mode() == {FULL: 4, NONE: 1}


def test_strict_refuses_a_downgrade() -> None:
    table = dispatcher()
    refuse_downgrade(table.dispatch(**decode(1)), strict=True)
    downgraded = table.dispatch(**decode(40))
    refuse_downgrade(downgraded, strict=False)
    with pytest.raises(GraphNotCaptured, match="strict=True, and a batch of 40 tokens would run NONE: 40 tokens are"):
        refuse_downgrade(downgraded, strict=True)


def test_a_static_size_is_taken_up_to_twice_as_large() -> None:
    """A static size is taken unless it cannot hold the batch or would waste too much."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72)
    table = Dispatcher(
        full=full_decode_descriptors(sizes, 72),
        piecewise=piecewise_descriptors(sizes),
        resolved=BOTH,
        static_sizes=(4, 32, 64),
    )

    def padded(num_tokens: int, uniform: int | None = 1) -> int:
        found = table.dispatch(num_tokens=num_tokens, num_reqs=num_tokens, uniform_token_count=uniform)
        return found.descriptor.num_tokens

    assert [padded(n) for n in (1, 2, 3, 4, 5, 9, 16, 17, 32, 33, 48, 64, 65)] == [
        1, 4, 4, 4, 8, 32, 32, 32, 32, 64, 64, 64, 72,
    ]  # fmt: skip
    assert padded(20, None) == 32
