"""A device of a few bytes that keeps the books a driver keeps, and refuses what it would refuse."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from piecegraph.errors import OutOfMemory


@dataclass
class FakeMemoryDriver:
    """A `MemoryDriver` over the host's memory; `calls` in order, without those that only look."""

    capacity: int
    granularity: int = 64
    fails_at: tuple[str, ...] = ()  # calls that raise
    calls: list[tuple[str, int]] = field(default_factory=list)  # name, bytes
    reserved: dict[int, int] = field(default_factory=dict)  # address -> bytes
    handles: dict[int, int] = field(default_factory=dict)  # not yet released -> bytes
    mapped: dict[int, int] = field(default_factory=dict)  # address -> bytes
    accessible: set[int] = field(default_factory=set)  # mapped addresses
    _backing: dict[int, np.ndarray] = field(default_factory=dict)
    _handle_at: dict[int, int] = field(default_factory=dict)  # mapped address -> handle
    _num_handles: int = 0

    @property
    def used_bytes(self) -> int:
        """Memory that is mapped, or held by a handle."""
        held = self.handles | {self._handle_at[address]: num_bytes for address, num_bytes in self.mapped.items()}
        return sum(held.values())

    def reserve(self, num_bytes: int) -> int:
        self._note("reserve", num_bytes)
        backing = np.zeros(num_bytes + self.granularity, dtype=np.uint8)
        address = -(-backing.ctypes.data // self.granularity) * self.granularity
        self.reserved[address], self._backing[address] = num_bytes, backing
        return address

    def create(self, num_bytes: int) -> int:
        self._note("create", num_bytes)
        if self.used_bytes + num_bytes > self.capacity:
            raise OutOfMemory("no memory left")
        self._num_handles += 1
        self.handles[self._num_handles] = num_bytes
        return self._num_handles

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._note("map", num_bytes)
        assert self.handles[handle] == num_bytes, "only all of a handle's memory can be mapped"
        assert any(start <= address and address + num_bytes <= start + size for start, size in self.reserved.items())
        assert all(end <= address or address + num_bytes <= start for start, end in self._spans()), "mapped twice"
        self.mapped[address], self._handle_at[address] = num_bytes, handle

    def set_access(self, address: int, num_bytes: int) -> None:
        self._note("set_access", num_bytes)
        assert self.mapped[address] == num_bytes
        self.accessible.add(address)

    def release(self, handle: int) -> None:
        self._note("release", self.handles.pop(handle))

    def unmap(self, address: int, num_bytes: int) -> None:
        self._note("unmap", num_bytes)
        assert self.mapped.pop(address) == num_bytes, "only whole mappings can be taken away"
        self.accessible.discard(address)

    def free(self, address: int, num_bytes: int) -> None:
        self._note("free", num_bytes)
        assert not any(address <= start < address + num_bytes for start in self.mapped), "still mapped"
        assert self.reserved.pop(address) == num_bytes

    def synchronize(self) -> None:
        self._note("synchronize", 0)

    def bytes_at(self, address: int, num_bytes: int, keeps: object) -> torch.Tensor:
        start = next(one for one in self.accessible if one <= address < one + self.mapped[one])  # as torch asks
        base = next(one for one, size in self.reserved.items() if one <= start < one + size)
        return torch.from_numpy(np.asarray(_HostBytes(address, num_bytes, keeps, self._backing[base])))

    def _note(self, name: str, num_bytes: int) -> None:
        assert num_bytes % self.granularity == 0, f"{name} of {num_bytes} bytes"
        self.calls.append((name, num_bytes))
        if name in self.fails_at:
            raise RuntimeError(f"{name} failed")

    def _spans(self) -> list[tuple[int, int]]:
        return [(start, start + size) for start, size in self.mapped.items()]


class _HostBytes:
    """Tells numpy of bytes; an array made from it keeps it, and so `keeps`."""

    def __init__(self, address: int, num_bytes: int, *keeps: object) -> None:
        self._keeps = keeps
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
