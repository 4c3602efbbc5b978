"""Staged writes as one Triton kernel: a few programs a write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.own_kernel import own_kernel
from piecegraph.runner.attention.kernels.launch import Grid, KernelCall, KernelPreparer, PreparedKernel, current_stream
from piecegraph.runner.staged_write import WORD_BYTES, PackedWrites

BLOCK = 1024
"""Cells a program copies at a time."""

MAX_PROGRAMS_PER_WRITE = 16
"""A long prompt is spread over as many; most writes are a cell or two and the others end at once."""


def apply_writes_on_gpu(tensor: torch.Tensor, packed: PackedWrites) -> None:
    """See `runner.staged_write.apply_writes_reference`. `packed` is of a ring for the device of `tensor`."""
    apply_writes_call(tensor, packed).launch()


def apply_writes_call(tensor: torch.Tensor, packed: PackedWrites) -> KernelCall:
    """`apply_writes_on_gpu`, not launched yet."""
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
    """`apply_writes_on_gpu` to one tensor that stays where it is: a tenth of the host's time from the second on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.get_device()
        self._kernel: PreparedKernel | None = None

    def write(self, packed: PackedWrites) -> None:
        """Mutates the tensor. The first compiles the kernel."""
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
