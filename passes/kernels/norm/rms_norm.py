"""RMS norm, alone or after a residual add, as one Triton kernel: each row is read once and kept in registers.

The norm may be rounded to int8 or to e4m3 there, for a quantised linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_SIZE
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.rows import evenly_spaced_rows_of, rows_of
from piecegraph.passes.kernels.quantised.rounded_rows import largest_value, rounded_groups


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and columns of a program, and its warps."""

    rows: int
    columns: int
    num_warps: int


def pick_tile(size: int) -> Tile:
    """Return the tile for rows of `size`.

    Short rows (a head's) share a program; a thread has 8 elements, one load of 16 bytes in 2-byte types, as long as 16
    warps are enough.
    """
    columns = triton.next_power_of_2(size)
    rows = max(1024 // columns, 1)
    return Tile(rows=rows, columns=columns, num_warps=min(max(rows * columns // 256, 1), 16))


def rms_norm_on_gpu(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    """Run `ops.rms_norm.rms_norm` on a GPU."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = rows_of(x)
    _launch(
        result,
        rows.tensor,
        rows.inner,
        rows.outer_stride,
        rows.inner_stride,
        weight=weight,
        eps=eps,
        offset=offset,
        num_rows=rows.num_rows,
    )
    return result


def add_rms_norm_on_gpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.rms_norm.add_rms_norm` on a GPU."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(result)
    _launch_of_sum(result, total, x, residual, weight=weight, eps=eps, offset=offset)
    return result, total


def rms_norm_rounded_on_gpu(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, group: int, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.quantised.rounded_norms.rms_norm_rounded` on a GPU.

    `group`: the columns that share a scale, a power of two or at least all of them.
    """
    values, step = _empty_rounded(x, group, stored)
    rows = rows_of(x)
    _launch(
        values,
        rows.tensor,
        rows.inner,
        rows.outer_stride,
        rows.inner_stride,
        step=step,
        group=group,
        weight=weight,
        eps=eps,
        offset=offset,
        num_rows=rows.num_rows,
    )
    return values, step


def add_rms_norm_rounded_on_gpu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    group: int,
    stored: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `ops.quantised.rounded_norms.add_rms_norm_rounded` on a GPU; `group` as in `rms_norm_rounded_on_gpu`."""
    values, step = _empty_rounded(x, group, stored)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_of_sum(values, total, x, residual, step=step, group=group, weight=weight, eps=eps, offset=offset)
    return values, step, total


def _launch_of_sum(
    result: torch.Tensor, total: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, **options: Any
) -> None:
    """Launch the kernel over `x + residual`, which is written to `total`; `options` are those of `_launch`."""
    x_rows, residual_rows = evenly_spaced_rows_of(x), evenly_spaced_rows_of(residual)
    _launch(
        result,
        x_rows.tensor,
        1,
        x_rows.outer_stride,
        0,
        residual=residual_rows.tensor,
        residual_stride=residual_rows.outer_stride,
        total=total,
        num_rows=x_rows.num_rows,
        **options,
    )


def _empty_rounded(x: torch.Tensor, group: int, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty_like(x, dtype=stored, memory_format=torch.contiguous_format)
    return values, x.new_empty((*x.shape[:-1], triton.cdiv(x.shape[-1], group)), dtype=torch.float32)


def add_rms_norm_of_parts_on_gpu(
    parts: torch.Tensor,  # [num_parts, rows of residual, size] float32, contiguous
    bias: torch.Tensor | None,  # [size]
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `add_rms_norm_on_gpu` on the sum of `parts` and `bias`, which is not rounded before the residual is added."""
    result = torch.empty_like(residual, memory_format=torch.contiguous_format)
    total = torch.empty_like(result)
    num_parts, num_rows, size = parts.shape
    rows = evenly_spaced_rows_of(residual)
    _launch(
        result,
        parts,
        1,
        size,
        0,
        num_parts=num_parts,
        bias=bias,
        residual=rows.tensor,
        residual_stride=rows.outer_stride,
        total=total,
        weight=weight,
        eps=eps,
        offset=offset,
        num_rows=num_rows,
    )
    return result, total


def _launch(
    result: torch.Tensor,
    x: torch.Tensor,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    *,
    num_parts: int = 1,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_stride: int = 0,
    total: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    group: int = 0,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    num_rows: int,
) -> None:
    size = result.shape[-1]
    if size > MAX_NORM_SIZE:
        raise ValueError(
            f"rms_norm got rows of {size}; its kernel takes up to {MAX_NORM_SIZE}: drop fuse-add-rms-norm."
        )
    if num_rows == 0:
        return
    tile = pick_tile(size)
    _rms_norm.launch(
        (triton.cdiv(num_rows, tile.rows), 1, 1),
        (
            result,
            step,
            total,
            x,
            bias,
            residual,
            None if weight is None else weight.contiguous(),
            num_rows,
            inner,
            outer_stride,
            inner_stride,
            residual_stride,
            eps,
            offset,
        ),
        {
            "SIZE": size,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "PARTS": num_parts,
            "GROUP": tile.columns if group >= size else group,
            "MOST": largest_value(result.dtype),
        },
        num_warps=tile.num_warps,
        may_overlap=weight is None or weight.is_contiguous(),  # else it was copied just now
    )


# Rows come and go from step to step: one compilation serves any number.
@own_kernel
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    result,  # [num_rows, SIZE], written
    step,  # [num_rows, groups of SIZE] float32, written; None unless the result is rounded
    total,  # [num_rows, SIZE], written; None without a residual
    x,  # row r at (r // inner) * outer_stride + (r % inner) * inner_stride; its next part num_rows * SIZE further
    bias,  # [SIZE], or None
    residual,  # row r at r * residual_stride, or None
    weight,  # [SIZE], or None
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # SIZE, padded to a power of two
    PARTS: tl.constexpr,  # of x, which are added up
    GROUP: tl.constexpr,  # columns that share a scale, which divide COLUMNS
    MOST: tl.constexpr,  # what the largest number of a group becomes
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of ROWS rows,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    columns = tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    mask = is_row & is_column[None, :]
    starts = (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride
    to = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    if weight is not None:
        factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32) + offset
    if OVERLAP:
        gdc_wait()
    wide = tl.load(x + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        wide += tl.load(x + part * num_rows * SIZE + starts[:, None] + columns[None, :], mask=mask, other=0.0)
    if bias is not None:
        wide += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        more = tl.load(residual + rows.to(tl.int64)[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0)
        rounded = (wide + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    if weight is not None:
        normed = normed * factor[None, :]
    if step is not None:
        IS_INTEGER: tl.constexpr = result.dtype.element_ty == tl.int8
        GROUPS: tl.constexpr = COLUMNS // GROUP
        if residual is not None:
            floats = normed.to(total.dtype.element_ty)
        else:
            floats = normed.to(x.dtype.element_ty)
        grouped = tl.where(mask, floats.to(tl.float32), 0.0).reshape([ROWS, GROUPS, GROUP])
        values, each = rounded_groups(grouped, 2, MOST, IS_INTEGER)
        tl.store(result + to, values.reshape([ROWS, COLUMNS]), mask=mask)
        group = tl.arange(0, GROUPS)
        num_groups = (SIZE + GROUP - 1) // GROUP
        steps = step + rows.to(tl.int64)[:, None] * num_groups + group[None, :]
        tl.store(steps, each, mask=is_row & (group < num_groups)[None, :])
    else:
        tl.store(result + to, normed.to(result.dtype.element_ty), mask=mask)


_rms_norm = OverlappedKernel(rms_norm_kernel)
