"""Which blocks a window has passed, and how many a request holds at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup, blocks_for


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 20))
def test_a_passed_block_has_no_token_that_is_still_seen(num_computed: int, block_size: int, window: int) -> None:
    """The next token sees positions from num_computed - window + 1; the last passed block ends before, the next does
    not.
    """
    num_passed = KVCacheGroup(sliding_window=window).num_passed_blocks(num_computed, block_size)
    first_seen = max(0, num_computed - window + 1)
    assert num_passed * block_size <= first_seen < (num_passed + 1) * block_size


def test_full_attention_passes_no_block() -> None:
    assert KVCacheGroup().num_passed_blocks(1000, 4) == 0


@given(
    st.integers(1, 80),
    st.integers(1, 8),
    st.one_of(
        st.just(KVCacheGroup()),
        st.just(KVCacheGroup(is_state=True)),
        st.builds(lambda tokens: KVCacheGroup(sliding_window=tokens), st.integers(1, 20)),
        st.builds(lambda tokens: KVCacheGroup(chunk_size=tokens), st.integers(1, 20)),
    ),
    st.integers(1, 12),
    st.data(),
)
def test_no_schedule_holds_more_than_max_blocks(
    num_tokens: int, block_size: int, group: KVCacheGroup, max_step: int, data: st.DataObject
) -> None:
    """Whatever the chunks, blocks from the first seen to the last written are within the promise."""
    most = group.max_blocks(num_tokens, block_size, max_step)
    num_computed = 0
    while num_computed < num_tokens:
        chunk = data.draw(st.integers(1, min(max_step, num_tokens - num_computed)))
        held = blocks_for(num_computed + chunk, block_size) - group.num_passed_blocks(num_computed, block_size)
        assert held <= most
        num_computed += chunk


def test_max_blocks_of_a_window_is_tight() -> None:
    """8 seen before a step of 4, blocks of 4: positions 3..14 lie in 4 blocks at worst, and no schedule needs 5."""
    group = KVCacheGroup(sliding_window=9)
    assert group.max_blocks(1000, 4, 4) == 4
    assert group.max_blocks(7, 4, 4) == 2


def test_an_impossible_window_is_refused() -> None:
    with pytest.raises(AssertionError, match="sliding_window=0; it must be 1 or more"):
        KVCacheGroup(sliding_window=0)


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 20))
def test_the_blocks_of_a_passed_chunk_are_passed(num_computed: int, block_size: int, chunk_size: int) -> None:
    """The next token sees its own chunk only; the block in which that begins is kept."""
    num_passed = KVCacheGroup(chunk_size=chunk_size).num_passed_blocks(num_computed, block_size)
    first_seen = num_computed // chunk_size * chunk_size
    assert num_passed * block_size <= first_seen < (num_passed + 1) * block_size


@pytest.mark.parametrize(("num_computed", "num_passed"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_state_of_the_last_token_is_kept(num_computed: int, num_passed: int) -> None:
    """With blocks of 4: the state after token 3 lies in block 0, and the next token needs it."""
    assert KVCacheGroup(is_state=True).num_passed_blocks(num_computed, 4) == num_passed


def test_one_slot_is_one_block() -> None:
    slot = KVCacheGroup(is_state=True, keeps_boundaries=False)
    assert slot.has_one_slot and slot.max_blocks(1000, 4, 64) == 1
    assert not KVCacheGroup(keeps_boundaries=False).has_one_slot


def test_a_group_is_of_one_kind() -> None:
    with pytest.raises(AssertionError, match="is of several kinds"):
        KVCacheGroup(sliding_window=4, is_state=True)
