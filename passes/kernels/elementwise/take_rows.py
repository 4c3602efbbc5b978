"""Rows of one or two tensors by their indices, as one Triton kernel: a program has a block of columns of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.rows import taken_shape

BLOCK = 1024
"""The columns of a program: in 2-byte types a thread of its four warps loads 16 bytes at once."""


def take_rows_on_gpu(sources: Sequence[torch.Tensor], index: torch.Tensor, dim: int, wraps: bool) -> list[torch.Tensor]:
    """Run `ops.take_rows.take_rows` on a GPU, with one launch for every two sources."""
    results = [source.new_empty(taken_shape(source, index, dim)) for source in sources]
    numbers = index.reshape(-1).contiguous()
    for at in range(0, len(sources), 2):
        _take_two(sources[at : at + 2], results[at : at + 2], numbers, dim, wraps)
    return results


def _take_two(
    sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor], numbers: torch.Tensor, dim: int, wraps: bool
) -> None:
    """Launch the kernel for one or two sources."""
    sizes = [math.prod(source.shape[dim + 1 :]) for source in sources]
    rows = [_rows(source, dim, size) for source, size in zip(sources, sizes, strict=True)]
    if numbers.numel() == 0 or max(sizes) == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(max(sizes)))
    second, size = (rows[1], sizes[1]) if len(rows) == 2 else (None, 0)
    _take_rows.launch(
        (numbers.numel(), sum(triton.cdiv(each, block) for each in sizes), 1),
        (
            results[0],
            rows[0],
            None if second is None else results[1],
            second,
            numbers,
            rows[0].shape[0],
            0 if second is None else second.shape[0],
            rows[0].stride(0),
            0 if second is None else second.stride(0),
        ),
        {"SIZE": sizes[0], "OTHER_SIZE": size, "BLOCK": block, "WRAPS": wraps},
        num_warps=max(block // 256, 1),
    )


def _rows(source: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the source as `[num_rows, size]` without gaps in a row; a copy if a row of the source has gaps."""
    assert all(each == 1 for each in source.shape[:dim]), (source.shape, dim)
    one = source[(0,) * dim]
    if one[:1].is_contiguous():
        return one.as_strided((one.shape[0], size), (one.stride(0), 1))
    return one.reshape(one.shape[0], size).contiguous()


# Rows come and go from step to step: one compilation serves any number.
@own_kernel
@triton.jit(do_not_specialize=["num_rows", "other_num_rows"])
def take_rows_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    result,  # [num_taken, SIZE], written
    source,  # [num_rows, SIZE], row_stride apart
    other_result,  # [num_taken, OTHER_SIZE], written, or None
    other,  # [other_num_rows, OTHER_SIZE], other_row_stride apart, or None
    numbers,  # [num_taken]
    num_rows,
    other_num_rows,
    row_stride,
    other_row_stride,
    SIZE: tl.constexpr,
    OTHER_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRAPS: tl.constexpr,  # a negative number counts from the end
    OVERLAP: tl.constexpr,
):
    """Grid: (taken rows, blocks of columns of the one source and then of the other)."""
    at = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(numbers + at).to(tl.int64)
    if other is None:
        _take(result, source, at, number, num_rows, row_stride, block, SIZE, BLOCK, WRAPS)
    else:
        if block < BLOCKS:
            _take(result, source, at, number, num_rows, row_stride, block, SIZE, BLOCK, WRAPS)
        else:
            block -= BLOCKS
            _take(other_result, other, at, number, other_num_rows, other_row_stride, block, OTHER_SIZE, BLOCK, WRAPS)


@own_kernel
@triton.jit
def _take(  # type: ignore[no-untyped-def]  # compiled by Triton
    result,
    source,
    at,
    number,
    num_rows,
    row_stride,
    block,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRAPS: tl.constexpr,
):
    """Copy one block of columns of row `number`; NaN if there is no such row."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    rows = tl.zeros([BLOCK], tl.int64) + number
    if WRAPS:
        rows = tl.where(rows < 0, rows + num_rows, rows)
    is_there = (rows >= 0) & (rows < num_rows)
    missing: tl.constexpr = float("nan") if source.dtype.element_ty.is_floating() else 0
    taken = tl.load(source + rows * row_stride + columns, mask=is_column & is_there, other=missing)
    tl.store(result + at * SIZE + columns, taken, mask=is_column)


_take_rows = OverlappedKernel(take_rows_kernel)
