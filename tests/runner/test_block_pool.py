"""Blocks are handed out once, and come back once."""

from __future__ import annotations

import pytest

from piecegraph.runner.block_pool import BlockPool, blocks_for


def test_blocks_are_distinct_and_the_longest_free_goes_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    pool.free([1])
    assert pool.allocate(2) == [3, 1]
    assert pool.num_free == 0


def test_freeing_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free(blocks)


def test_asking_for_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        BlockPool(2).allocate(3)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(num_tokens: int, blocks: int) -> None:
    assert blocks_for(num_tokens, 16) == blocks
