"""Tensors in host memory that kernels read where it lies."""

from __future__ import annotations

import torch


class UvaTensor:
    """A zeroed tensor the host writes like any array and a GPU reads over the bus, without a copy.

    `cpu` and `np` are the host's views, `gpu` is the device's: the same pinned memory, at the same
    address, which is CUDA's unified virtual addressing (UVA). On a CPU device `gpu` is `cpu`, unpinned.
    For what is large and read rarely, a prompt's token ids for one: every read crosses the bus.

    A kernel sees what the host wrote before it was launched (or its graph replayed). Nothing waits: a
    step in flight still reads, so the host may write only cells that no such step reads. The state rows
    make that simple: a row is its request's until the step that removes it has run, and only then may
    another request's values be written there. Kernels should not write: the host cannot know when.

    Keep this object as long as anything reads `gpu`, captured graphs included: torch's allocator of
    pinned memory learns of copies, but not of kernels, and would hand the memory out again.

    Args:
        shape: of all three views.
        dtype: one that numpy has, so not bfloat16 (TypeError).
        device: where the readers run.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.cpu = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self.np = self.cpu.numpy()
        self.gpu = _device_view(self.cpu, device) if is_cuda else self.cpu


class _MappedMemory:
    """Tells torch of pinned memory as if it were a GPU's. A view made from it keeps it, and so `cpu`."""

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
    """A CUDA tensor over the pinned, contiguous `cpu`: pinned memory has one address for host and device."""
    view = torch.as_tensor(_MappedMemory(cpu), device=device)
    assert view.data_ptr() == cpu.data_ptr(), (
        f"torch copied pinned memory at {cpu.data_ptr():#x} to {view.data_ptr():#x} instead of viewing it "
        f"from {device}: keep this tensor on the device instead"
    )
    return view
