"""Tensors in pinned host memory that kernels read in place, and a ring of such buffers."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

SMALLEST = 1024
"""The number of words in the smallest buffer of a ring; every capacity is a power of two."""


class UvaTensor:
    """A zeroed tensor that the host writes like an array and that a GPU reads over the bus, without a copy.

    `cpu` and `np` are the host's views and `gpu` is the device's view of the same pinned memory at the same
    address, which is CUDA's unified virtual addressing (UVA). On a CPU device `gpu` is `cpu`, unpinned.
    Suited to large tensors that are read rarely, such as a prompt's token ids: every read crosses the bus.

    A kernel sees what the host wrote before the kernel was launched (or its graph replayed). There is no
    synchronisation: the host may write only cells that no step in flight reads. State rows make that simple:
    a row belongs to its request until the step that removes the request has run, and only then may another
    request's values be written there. Kernels must not write, because the host cannot know when they do.

    Keep this object as long as anything reads `gpu`, captured graphs included: torch's pinned-memory allocator
    tracks copies, but not kernels, and would reuse the memory.

    Args:
        shape: the shape of all three views.
        dtype: a dtype that numpy has, so not bfloat16 (TypeError).
        device: the device of the readers.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.cpu = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self.np = self.cpu.numpy()
        self.gpu = _device_view(self.cpu, device) if is_cuda else self.cpu


class _MappedMemory:
    """Pinned memory presented to torch as a GPU's. A view made from this object keeps it, and so `cpu`, alive."""

    def __init__(self, cpu: torch.Tensor) -> None:
        self._cpu = cpu
        self.__cuda_array_interface__ = {
            "shape": tuple(cpu.shape),
            "typestr": cpu.numpy().dtype.str,
            "data": (cpu.data_ptr(), False),  # False: not read-only, as torch has no read-only tensors
            "strides": None,  # contiguous
            "version": 3,
        }


def _device_view(cpu: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CUDA tensor over the pinned, contiguous `cpu`, whose address is the same for host and device."""
    view = torch.as_tensor(_MappedMemory(cpu), device=device)
    assert view.data_ptr() == cpu.data_ptr(), (
        f"torch copied pinned memory at {cpu.data_ptr():#x} to {view.data_ptr():#x} instead of viewing it "
        f"from {device}: keep this tensor on the device instead"
    )
    return view


class UvaBuffer:
    """A buffer that the host writes (`np`) and kernels read (`gpu`), both `[capacity]` int32."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._memory = UvaTensor((capacity,), torch.int32, device)
        self._is_read = torch.cuda.Event() if device.type == "cuda" else None
        self.np: npt.NDArray[np.int32] = self._memory.np
        self.gpu = self._memory.gpu

    def read_until_here(self) -> None:
        """Record that all readers are launched on the current stream; the ring reuses the buffer after them."""
        if self._is_read is not None:
            self._is_read.record()

    @property
    def is_free(self) -> bool:
        """Return whether all recorded readers have finished."""
        return self._is_read is None or self._is_read.query()


class UvaRing:
    """A pool of buffers, as many of each size as are read at once, so that a step allocates and copies none.

    `take` never waits: while the oldest buffer is still being read, another one is made. Keep the ring as long as
    anything reads from it, for the reason given in `UvaTensor`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_capacity: dict[int, deque[UvaBuffer]] = {}  # least recently used first

    def take(self, num_words: int) -> UvaBuffer:
        """Return a buffer of at least `num_words` words that nothing reads.

        Call its `read_until_here` before the next `take`.
        """
        capacity = max(SMALLEST, 1 << (num_words - 1).bit_length())
        buffers = self._by_capacity.setdefault(capacity, deque())
        buffer = buffers.popleft() if buffers and buffers[0].is_free else UvaBuffer(capacity, self._device)
        buffers.append(buffer)
        return buffer
