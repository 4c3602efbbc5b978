"""Tensors that get more memory at the addresses they have: the cache grows after graphs were captured over it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.cuda_memory import MemoryDriver


class GrowingMemory:
    """Owns the memory of tensors whose first dimension counts blocks, the same number in each.

    A tensor has its final shape, strides and address from the start; only its first blocks have memory, and
    `grow` adds to them. Reading or writing a block without memory is a fault of the device, as with any bad
    address, so callers must know how many there are (`num_blocks`).

    Each tensor has a range of its own, laid out as if torch had allocated it: a request's blocks stay close
    together, which tensors sharing a range would give up. The price is rounding: each tensor's memory is a
    multiple of `driver.granularity` (2 MiB on today's GPUs), so up to that much a tensor lies idle, or is left
    over by `blocks_within`: 0.1 % of a cache of 100 GiB in 56 tensors.

    The memory is freed when the last tensor over it is gone, views included, or by `close`. Not thread-safe.
    """

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._ranges: list[_Range] = []
        self._finalizer = weakref.finalize(self, _free, driver, self._ranges)
        self._finalizer.atexit = False  # the process takes its memory with it

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of `shape` on `device`, the driver's; its first blocks, at least one, have memory.

        As many blocks get memory as fit into the smallest amount the driver gives. Raises `OutOfMemory`.
        """
        assert self._finalizer.alive, "this memory is closed"
        num_blocks, *block_shape = shape
        block_bytes = math.prod(block_shape) * dtype.itemsize
        num_bytes = num_blocks * block_bytes
        assert num_bytes > 0, f"a tensor of shape {tuple(shape)} has nothing to grow"
        reserved_bytes = self._rounded(num_bytes)
        made = _Range(
            address=self._driver.reserve(reserved_bytes),
            reserved_bytes=reserved_bytes,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
        )
        self._ranges.append(made)
        self._map([(made, self._rounded(block_bytes))])
        tensor = self._driver.bytes_at(made.address, num_bytes, self).view(dtype).view(*shape)
        assert tensor.device.type == device.type, f"the driver's tensors are on {tensor.device}, wanted {device}"
        return tensor

    @property
    def num_blocks(self) -> int:
        """Blocks of every tensor that have memory."""
        return min(part.num_mapped_blocks for part in self._ranges)

    @property
    def mapped_bytes(self) -> int:
        """What all of this takes of the device's memory."""
        return sum(part.mapped_bytes for part in self._ranges)

    def bytes_for(self, num_blocks: int) -> int:
        """What it would take if `num_blocks` blocks, and no more, had memory."""
        return sum(self._rounded(max(num_blocks, 1) * part.block_bytes) for part in self._ranges)

    def blocks_within(self, num_bytes: int) -> int:
        """The most blocks that take no more than `num_bytes` in all, at most what is reserved; 0 if not one does."""
        low, high = 0, min(part.num_blocks for part in self._ranges)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= num_bytes else (low, middle - 1)
        return low

    def grow(self, num_blocks: int) -> None:
        """Give the first `num_blocks` blocks of every tensor memory; those that have some keep it, and what is in
        it. Never takes any away.

        Raises `OutOfMemory`, with everything as it was before, if the device has too little.
        """
        assert self._finalizer.alive, "this memory is closed"
        reserved = min(part.num_blocks for part in self._ranges)
        assert num_blocks <= reserved, f"{num_blocks} blocks, but addresses are reserved for {reserved}"
        self._map([(part, self._rounded(num_blocks * part.block_bytes)) for part in self._ranges])

    def close(self) -> None:
        """Wait for the device and free everything; harmless when repeated. Tensors over it must not be used again,
        nor graphs that were captured over them replayed."""
        self._finalizer()

    def _map(self, wanted: Sequence[tuple[_Range, int]]) -> None:
        """Bring each range to as many bytes, all of them or none."""
        before = [len(part.pieces) for part, _ in wanted]
        try:
            for part, num_bytes in wanted:
                if num_bytes > part.mapped_bytes:
                    self._map_piece(part, num_bytes - part.mapped_bytes)
        except BaseException as error:
            made_bytes = 0
            for (part, _), count in zip(wanted, before, strict=True):
                while len(part.pieces) > count:
                    made_bytes += part.pieces[-1]
                    part.unmap_last(self._driver)
            if isinstance(error, OutOfMemory):
                asked = sum(max(num_bytes - part.mapped_bytes, 0) for part, num_bytes in wanted)
                raise OutOfMemory(
                    f"the key/value cache asked for {asked / 2**20:.1f} MiB more in {len(wanted)} tensors, on top of "
                    f"{self.mapped_bytes / 2**20:.1f} MiB, and the GPU ran out after {made_bytes / 2**20:.1f} MiB. "
                    "Another process may have taken memory since it was measured: lower gpu_memory_utilization, or "
                    "give num_kv_blocks."
                ) from error
            raise

    def _map_piece(self, part: _Range, num_bytes: int) -> None:
        driver, address = self._driver, part.address + part.mapped_bytes
        handle = driver.create(num_bytes)
        try:
            driver.map(address, num_bytes, handle)
        finally:
            driver.release(handle)  # from here on the mapping alone keeps the memory
        part.pieces.append(num_bytes)
        driver.set_access(address, num_bytes)

    def _rounded(self, num_bytes: int) -> int:
        granularity = self._driver.granularity
        return -(-num_bytes // granularity) * granularity


@dataclass(slots=True, kw_only=True)
class _Range:
    """One tensor's addresses, and the pieces of memory from its start on."""

    address: int
    reserved_bytes: int
    num_blocks: int
    block_bytes: int
    pieces: list[int] = field(default_factory=list)  # bytes of each, in order

    @property
    def mapped_bytes(self) -> int:
        return sum(self.pieces)

    @property
    def num_mapped_blocks(self) -> int:
        return min(self.mapped_bytes // self.block_bytes, self.num_blocks)

    def unmap_last(self, driver: MemoryDriver) -> None:
        num_bytes = self.pieces.pop()
        driver.unmap(self.address + self.mapped_bytes, num_bytes)


def _free(driver: MemoryDriver, ranges: list[_Range]) -> None:
    driver.synchronize()  # unmapping waits for nobody
    while ranges:
        part = ranges.pop()
        while part.pieces:
            part.unmap_last(driver)
        driver.free(part.address, part.reserved_bytes)
