"""Staged writes as one Triton kernel: a few programs a write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.runner.staged_write import PackedWrites

BLOCK = 1024
"""Cells a program copies at a time."""

MAX_PROGRAMS_PER_WRITE = 16
"""A long prompt is spread over as many; most writes are a cell or two and the others end at once."""


def apply_writes_on_gpu(tensor: torch.Tensor, packed: PackedWrites) -> None:
    """See `runner.staged_write.apply_writes_reference`. `packed` is on the device of `tensor`."""
    programs_per_write = min(triton.cdiv(packed.longest, BLOCK), MAX_PROGRAMS_PER_WRITE)
    _apply_writes[(packed.num_writes, programs_per_write)](
        tensor,
        tensor.stride(0),
        packed.words,
        packed.contents(tensor.dtype),
        packed.num_writes,
        BLOCK=BLOCK,
    )


# Nothing that changes from step to step is specialised on, so a type of tensor is compiled for once.
@triton.jit(do_not_specialize=["tensor_stride", "num_writes"])
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
