"""Tensors whose memory grows at fixed addresses, so that the cache can grow after graphs are captured over it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.device_memory.cuda_memory import MemoryDriver


class GrowingMemory:
    """The owner of the memory of tensors whose first dimension counts blocks, the same number in each tensor.

    A tensor has its final shape, strides and address from the start; only its first blocks have memory, and
    `grow` extends them. Accessing a block without memory is a device fault, as for any invalid address, so callers
    must respect `num_blocks`.

    Each tensor has its own range of addresses, laid out as if torch had allocated it, so that a request's blocks stay
    close together. The price is rounding: each tensor's memory is a multiple of `driver.granularity` (2 MiB on current
    GPUs), so up to that much per tensor is idle, or is left over by `blocks_within`: 0.1 % of a cache of 100 GiB in 56
    tensors.

    `unmap` gives all memory back while addresses stay, and `map_again` allocates as much as there was.

    The memory is freed with the last tensor over it, views included, or by `close`. Not thread-safe.
    """

    def __init__(self, driver: MemoryDriver, *, holds: str = "the key/value cache") -> None:
        """Start without tensors. `holds`: what lies in the memory, for error messages."""
        self._driver = driver
        self._holds = holds
        self._unmapped: list[tuple[_Range, int]] = []  # the ranges without memory, and how much they had
        self._ranges: list[_Range] = []
        self._finalizer = weakref.finalize(self, _free, driver, self._ranges)
        self._finalizer.atexit = False  # the driver frees the memory of a process that exits

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of `shape` on `device`, which must be the driver's.

        The first blocks, at least one, have memory: as many as fit into the driver's granularity. Raises
        `OutOfMemory`.
        """
        assert self._finalizer.alive, "this memory is closed"
        num_blocks, *block_shape = shape
        block_bytes = math.prod(block_shape) * dtype.itemsize
        num_bytes = num_blocks * block_bytes
        assert num_bytes > 0, f"a tensor of shape {tuple(shape)} has nothing to grow"
        reserved_bytes = self._rounded(num_bytes)
        part = _Range(
            address=self._driver.reserve(reserved_bytes),
            reserved_bytes=reserved_bytes,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
        )
        self._ranges.append(part)
        self._map([(part, self._rounded(block_bytes))])
        tensor = self._driver.bytes_at(part.address, num_bytes, self).view(dtype).view(*shape)
        assert tensor.device.type == device.type, f"the driver's tensors are on {tensor.device}, wanted {device}"
        return tensor

    @property
    def num_blocks(self) -> int:
        """The number of blocks of every tensor that have memory."""
        return min(part.num_mapped_blocks for part in self._ranges)

    @property
    def mapped_bytes(self) -> int:
        """The device memory of all tensors, in bytes."""
        return sum(part.mapped_bytes for part in self._ranges)

    def bytes_for(self, num_blocks: int) -> int:
        """Return the device memory in bytes that exactly `num_blocks` blocks would take."""
        return sum(self._rounded(max(num_blocks, 1) * part.block_bytes) for part in self._ranges)

    def blocks_within(self, num_bytes: int) -> int:
        """Return the largest number of blocks, at most the reserved ones, that take at most `num_bytes` in all."""
        low, high = 0, min(part.num_blocks for part in self._ranges)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= num_bytes else (low, middle - 1)
        return low

    def grow(self, num_blocks: int) -> None:
        """Allocate memory for the first `num_blocks` blocks of every tensor; never frees any.

        Blocks with memory keep their contents. Raises `OutOfMemory`, without any change, if the device has too little.
        """
        assert self._finalizer.alive, "this memory is closed"
        reserved = min(part.num_blocks for part in self._ranges)
        assert num_blocks <= reserved, f"{num_blocks} blocks, but addresses are reserved for {reserved}"
        self._map([(part, self._rounded(num_blocks * part.block_bytes)) for part in self._ranges])

    @property
    def is_mapped(self) -> bool:
        """Return whether the tensors have memory: `unmap` was not called, or `map_again` was called after it."""
        return not self._unmapped

    def unmap(self) -> int:
        """Wait for the device, free the memory of all tensors, and return how many bytes that were.

        The tensors keep their addresses. Until `map_again` any access to them is a device fault. Idempotent.
        """
        assert self._finalizer.alive, "this memory is closed"
        if not self.is_mapped:
            return 0
        self._driver.synchronize()  # because unmapping does not wait
        num_bytes = self.mapped_bytes
        self._unmapped = [(part, part.mapped_bytes) for part in self._ranges]
        for part in self._ranges:
            while part.pieces:
                part.unmap_last(self._driver)
        return num_bytes

    def map_again(self) -> None:
        """Allocate what `unmap` has freed, at the same addresses, with undefined contents. Idempotent.

        Raises `OutOfMemory`, without any change, if the device has too little.
        """
        assert self._finalizer.alive, "this memory is closed"
        self._map(self._unmapped)
        self._unmapped = []

    def tensor_at(self, base: torch.Tensor, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a tensor `[num_bytes]` uint8, with a storage of its own, `offset` bytes behind the start of `base`.

        `base` is a tensor of this memory, and all of the bytes lie in it. They must be mapped now.
        """
        assert offset >= 0 and offset + num_bytes <= base.nbytes, f"{offset} + {num_bytes} of {base.nbytes} bytes"
        return self._driver.bytes_at(base.data_ptr() + offset, num_bytes, self)

    def close(self) -> None:
        """Wait for the device and free all memory. Idempotent.

        The tensors must not be used afterwards, and graphs captured over them must not be replayed.
        """
        self._finalizer()

    def _map(self, wanted: Sequence[tuple[_Range, int]]) -> None:
        """Extend each range to the given number of bytes, all ranges or none."""
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
                    f"{self._holds} asked for {asked / 2**20:.1f} MiB more in {len(wanted)} tensors, on top of "
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
            driver.release(handle)  # from here on only the mapping keeps the memory
        part.pieces.append(num_bytes)
        driver.set_access(address, num_bytes)

    def _rounded(self, num_bytes: int) -> int:
        granularity = self._driver.granularity
        return -(-num_bytes // granularity) * granularity


@dataclass(slots=True, kw_only=True)
class _Range:
    """One tensor's range of addresses, and the pieces of memory mapped from its start on."""

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
    driver.synchronize()  # because unmapping does not wait
    while ranges:
        part = ranges.pop()
        while part.pieces:
            part.unmap_last(driver)
        driver.free(part.address, part.reserved_bytes)
