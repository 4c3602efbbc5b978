"""Blocks of the key/value cache: who holds them, which are free, and what the free ones still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Blocks `0 <= block < num_blocks`, counted references, and names for the contents of full ones.

    A block without references is free, but keeps its contents and its name until it is handed out again;
    the longest free goes first. All calls take O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"num_blocks={num_blocks}; it must be 1 or more"
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        # First out first. An OrderedDict is a linked list: a plain dict would walk over what was taken before.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._name_of: list[Hashable | None] = [None] * num_blocks
        self._block_of: dict[Hashable, int] = {}
        self._twins: dict[Hashable, list[int]] = {}  # further blocks of one name: requests that ran side by side

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_named(self) -> int:
        """Names that `find` knows."""
        return len(self._block_of)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def is_free(self, block: int) -> bool:
        return self._num_references[block] == 0

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, whose names are forgotten; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._num_references[block] = 1
            if self._name_of[block] is not None:
                self._forget(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a free one is taken, with its contents."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each. Those without one become free, the first given before the last."""
        for block in blocks:
            left = self._num_references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            self._num_references[block] = left
            if left == 0:
                self._free[block] = None
                if (
                    self._name_of[block] is None
                ):  # nobody can ask for its contents, so it goes before all that have a name
                    self._free.move_to_end(block, last=False)

    def find(self, name: Hashable) -> int | None:
        """A block of that name, free or not; takes no reference."""
        return self._block_of.get(name)

    def register(self, block: int, name: Hashable) -> None:
        """Name the contents of `block`, which is held, full and will not be written again."""
        assert self._num_references[block] > 0, f"block {block} is free; only who holds a block knows its contents"
        assert self._name_of[block] is None, f"block {block} has a name already"
        self._name_of[block] = name
        if self._block_of.setdefault(name, block) != block:
            self._twins.setdefault(name, []).append(block)

    def forget_names(self) -> None:
        """No contents are found any more; blocks stay held or free as they are."""
        self._name_of = [None] * self.num_blocks
        self._block_of.clear()
        self._twins.clear()

    def _forget(self, block: int) -> None:
        name, self._name_of[block] = self._name_of[block], None
        twins = self._twins.get(name)
        if twins is None:
            del self._block_of[name]
            return
        if self._block_of[name] == block:
            self._block_of[name] = twins.pop()
        else:
            twins.remove(block)
        if not twins:
            del self._twins[name]
