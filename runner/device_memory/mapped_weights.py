"""The weights of a model in memory that is given back and restored at the same addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from piecegraph.runner.device_memory.cuda_memory import MemoryDriver
from piecegraph.runner.device_memory.growing_memory import GrowingMemory

ALIGNMENT = 512
"""Bytes to which each storage is aligned, as by torch's allocator."""

GROUP_BYTES = 256 << 20
"""The least size of a group of storages that lie side by side. The memory of a device comes in multiples of 2 MiB,
so that a range of its own for every norm would cost more than the norms; and while weights move, the device holds at
most two copies of one group."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The memory of one storage."""

    values: torch.Tensor  # [num_bytes] uint8, over all of it
    is_restorable: bool  # whether a reload of the weights writes all of it


class MappedWeights:
    """The storages of a model's tensors, moved into memory that can be unmapped. Graphs are captured afterwards."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._memory = GrowingMemory(driver, holds="the weights")
        self._parts: list[_Part] = []
        self._saved: dict[int, torch.Tensor] = {}  # by the index of a part: its values, on the host

    @property
    def num_bytes(self) -> int:
        """The memory of the weights, in bytes, whether it is there now or not."""
        return sum(part.values.nbytes for part in self._parts)

    def move(self, tensors: Iterable[torch.Tensor], restorable: Collection[int] = ()) -> None:
        """Copy the storages of `tensors`, and make each of these objects a view of the copy of its storage.

        All tensors that share a storage must be given, or the others go on reading the old one, which then stays in
        memory. `restorable`: the addresses of storages that a reload of the weights writes. Shapes, strides and values
        stay, and so do the objects. Raises `OutOfMemory`; what has been moved until then is as good as before.
        """
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in {id(each): each for each in tensors}.values():
            if tensor.untyped_storage().nbytes():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        group: list[list[torch.Tensor]] = []
        size = 0
        for address in list(by_storage):
            views = by_storage.pop(address)
            group.append(views)
            size += _aligned(views[0].untyped_storage().nbytes())
            if size >= GROUP_BYTES or not by_storage:
                self._move_group(group, size, restorable)
                group, size = [], 0

    def release(self, *, is_reloaded: bool) -> int:
        """Give the memory back, and return how many bytes that were. The tensors may not be used until `restore`.

        Their values are kept on the host, but for those that a reload writes if `is_reloaded`. Called again with
        `is_reloaded`, it drops the values that are kept and that a reload writes.
        """
        for index, part in enumerate(self._parts):
            if is_reloaded and part.is_restorable:
                self._saved.pop(index, None)
            elif (
                self._memory.is_mapped and index not in self._saved
            ):  # what is kept of a call that was cut off is right
                self._saved[index] = part.values.to("cpu", copy=True)
        return self._memory.unmap()

    def restore(self) -> None:
        """Allocate the memory again, and write the values that were kept. Idempotent. Raises `OutOfMemory`."""
        self._memory.map_again()
        for index, values in self._saved.items():
            self._parts[index].values.copy_(values)
        self._saved = {}

    def _move_group(self, group: list[list[torch.Tensor]], size: int, restorable: Collection[int]) -> None:
        device = group[0][0].device
        base = self._memory.empty((1, size), dtype=torch.uint8, device=device)
        offset = 0
        for views in group:
            storage = views[0].untyped_storage()
            values = self._memory.tensor_at(base, offset, storage.nbytes())
            values.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
            self._parts.append(_Part(values, storage.data_ptr() in restorable))
            for view in views:
                _view_in(view, values.untyped_storage())
            offset += _aligned(storage.nbytes())
            del storage
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _view_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Make the object `tensor` a view of `storage`, at its own offset."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = made


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
