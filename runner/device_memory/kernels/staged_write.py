"""The Triton kernel of staged writes, with a few programs per write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.overlapped import current_stream
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.triton.kernels.launch import (
    Grid,
    KernelCall,
    KernelPreparer,
    PreparedKernel,
)
from piecegraph.runner.device_memory.host_memory.packed_writes import WORD_BYTES, PackedWrites

BLOCK = 1024
"""The number of cells that a program copies at a time."""

MAX_PROGRAMS_PER_WRITE = 16
"""The largest number of programs for a write. A long prompt uses all of them; for the usual write of one or two cells
the additional programs end at once."""


def apply_writes_on_gpu(tensor: torch.Tensor, packed: PackedWrites) -> None:
    """Write `packed` into `tensor`, like `apply_writes_reference`; the tensor's device reads the buffer."""
    apply_writes_call(tensor, packed).launch()


def apply_writes_call(tensor: torch.Tensor, packed: PackedWrites) -> KernelCall:
    """Return the kernel call of `apply_writes_on_gpu` without launching it."""
    arguments = {
        "tensor": tensor,
        "tensor_stride": tensor.stride(0),
        "words": packed.buffer.gpu,
        "contents": packed.contents(tensor.dtype),
        "num_writes": packed.num_writes,
        "BLOCK": BLOCK,
    }
    return KernelCall(_apply_writes, _grid(packed), arguments, {})


class PreparedWriter:
    """A writer to one tensor at a fixed address, which from the second write on takes a tenth of the host's time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.get_device()
        self._kernel: PreparedKernel | None = None

    def write(self, packed: PackedWrites) -> None:
        """Write `packed` into the tensor. The first call compiles the kernel."""
        if self._kernel is None:
            call = apply_writes_call(self._tensor, packed)
            self._kernel = KernelPreparer().prepare(call, changing=("words", "contents", "num_writes"))
        words = packed.buffer.gpu.data_ptr()
        contents = words + packed.first_content * WORD_BYTES
        self._kernel.launch(_grid(packed), current_stream(self._device), words, contents, packed.num_writes)


def _grid(packed: PackedWrites) -> Grid:
    return packed.num_writes, min(triton.cdiv(packed.longest, BLOCK), MAX_PROGRAMS_PER_WRITE), 1


# Nothing that changes from step to step is specialised on, so a type of tensor is compiled for once.
@own_kernel
@triton.jit(
    do_not_specialize=["tensor_stride", "num_writes"],
    do_not_specialize_on_alignment=["words", "contents"],
)
def _apply_writes(  # type: ignore[no-untyped-def]  # compiled by Triton
    tensor,  # [rows, width] or [rows], written
    tensor_stride,
    words,  # int32: num_writes rows, as many starts, as many ends
    contents,  # [ends[-1]], of the tensor's type
    num_writes,
    BLOCK: tl.constexpr,
):
    write = tl.program_id(0)
    row = tl.load(words + write).to(tl.int64)
    start = tl.load(words + num_writes + write)
    ends = words + 2 * num_writes
    first = tl.load(ends + write - 1, mask=write > 0, other=0)
    length = tl.load(ends + write) - first
    cells = tensor + row * tensor_stride + start
    for at in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        content = tl.load(contents + first + offsets, mask=offsets < length)
        tl.store(cells + offsets, content, mask=offsets < length)
