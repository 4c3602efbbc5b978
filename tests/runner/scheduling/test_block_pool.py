"""References are counted, free blocks keep their contents as long as possible."""

from __future__ import annotations

import pytest

from piecegraph.runner.scheduling.block_pool import BlockPool


def test_the_longest_free_goes_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.register(block, f"name {block}")
    pool.release([2])
    pool.release([0, 3])
    assert pool.num_free == 3
    assert pool.allocate(3) == [2, 0, 3]


def test_a_block_without_a_name_goes_before_all_that_have_one() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.register(0, "a")
    pool.register(1, "b")
    pool.release([0, 1, 2])
    assert pool.allocate(3) == [2, 0, 1]


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, "a")
    pool.release([block])
    assert pool.find("a") == block and pool.is_free(block)
    pool.allocate(2)
    assert pool.find("a") is None


def test_touching_takes_a_free_block_with_its_contents() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, "a")
    pool.release([block])
    pool.touch([block])
    assert pool.num_free == 1 and pool.find("a") == block
    assert pool.allocate(1) != [block]


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.release([block])
    assert pool.num_references(block) == 1 and pool.num_free == 0
    pool.release([block])
    assert pool.num_references(block) == 0 and pool.num_free == 1


@pytest.mark.parametrize("first_to_go", [0, 1, 2])
def test_two_blocks_of_one_name_are_found_as_long_as_one_is_left(first_to_go: int) -> None:
    """Requests that run side by side compute the same block; neither must hide the other."""
    pool = BlockPool(3)
    pool.allocate(3)
    for block in range(3):
        pool.register(block, "same")
    order = [first_to_go, *(block for block in range(3) if block != first_to_go)]
    for left, block in zip((2, 1, 0), order, strict=True):
        pool.release([block])
        assert pool.allocate(1) == [block]
        others = order[len(order) - left :]
        assert (pool.find("same") in others) if others else (pool.find("same") is None)
    assert pool.num_named == 0


def test_forgotten_names_are_not_found_and_can_be_given_again() -> None:
    pool = BlockPool(2)
    held, free = pool.allocate(2)
    pool.register(held, "a")
    pool.register(free, "a")
    pool.release([free])
    pool.forget_names()
    assert pool.find("a") is None and pool.num_free == 1
    pool.register(held, "b")
    assert pool.find("b") == held
    assert pool.allocate(1) == [free]


def test_a_forgotten_name_leaves_its_blocks_to_be_taken_first() -> None:
    """All blocks of the name, free or not; other names stay, and an unknown name is no error."""
    pool = BlockPool(4)
    for block in pool.allocate(4):
        pool.register(block, "other" if block == 0 else "same")
    pool.release([0, 1, 2])
    pool.forget("same")
    pool.forget("unknown")
    assert pool.find("same") is None and pool.find("other") == 0 and pool.num_named == 1
    pool.release([3])
    assert sorted(pool.allocate(3)) == [1, 2, 3] and pool.find("other") == 0


def test_misuse_raises() -> None:
    """Each of these would hand one block to two requests, or name what somebody still writes."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.register(0, "a")
    pool.allocate(1)
    pool.register(0, "a")
    with pytest.raises(AssertionError, match="block 0 has a name already"):
        pool.register(0, "b")
    pool.release([0])
    with pytest.raises(AssertionError, match="block 0 released more often than taken"):
        pool.release([0])
