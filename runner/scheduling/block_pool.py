"""The blocks of the key/value cache: their references, the free ones, and the names of their contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Blocks `0 <= block < num_blocks` with reference counts, and names for the contents of full blocks.

    A block without references is free, but keeps its contents and its name until it is allocated again;
    the block that has been free longest is allocated first. All calls take O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"num_blocks={num_blocks}; it must be 1 or more"
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        # First out first. An OrderedDict is a linked list: a plain dict would walk over what was taken before.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._name_of: list[Hashable | None] = [None] * num_blocks
        self._block_of: dict[Hashable, int] = {}
        self._duplicates: dict[Hashable, list[int]] = {}  # further blocks of one name, of requests that ran together

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def num_named(self) -> int:
        """The number of names that `find` knows."""
        return len(self._block_of)

    def num_references(self, block: int) -> int:
        """Return the number of references to `block`."""
        return self._num_references[block]

    def is_free(self, block: int) -> bool:
        """Return True if `block` has no reference."""
        return self._num_references[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each and forget their names; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._num_references[block] = 1
            if self._name_of[block] is not None:
                self._forget(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a free block is taken with its contents."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. Blocks without a reference become free, in the order given."""
        for block in blocks:
            left = self._num_references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            self._num_references[block] = left
            if left == 0:
                self._free[block] = None
                # Contents without a name cannot be found, so the block is allocated before all that have a name.
                if self._name_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, name: Hashable) -> int | None:
        """Return a block of that name, free or not, or None; takes no reference."""
        return self._block_of.get(name)

    def register(self, block: int, name: Hashable) -> None:
        """Name the contents of `block`, which has a reference, is full and will not be written again."""
        assert self._num_references[block] > 0, f"block {block} is free; only a block with a reference can be named"
        assert self._name_of[block] is None, f"block {block} has a name already"
        self._name_of[block] = name
        if self._block_of.setdefault(name, block) != block:
            self._duplicates.setdefault(name, []).append(block)

    def forget(self, name: Hashable) -> None:
        """Forget a name, if it is known; free blocks that had it are allocated before all that have names."""
        for block in [*self._duplicates.pop(name, ()), self._block_of.pop(name, None)]:
            if block is not None:
                self._name_of[block] = None
                if self._num_references[block] == 0:
                    self._free.move_to_end(block, last=False)

    def forget_names(self) -> None:
        """Forget all names, so that no contents are found; blocks keep their references."""
        self._name_of = [None] * self.num_blocks
        self._block_of.clear()
        self._duplicates.clear()

    def _forget(self, block: int) -> None:
        name, self._name_of[block] = self._name_of[block], None
        duplicates = self._duplicates.get(name)
        if duplicates is None:
            del self._block_of[name]
            return
        if self._block_of[name] == block:
            self._block_of[name] = duplicates.pop()
        else:
            duplicates.remove(block)
        if not duplicates:
            del self._duplicates[name]
