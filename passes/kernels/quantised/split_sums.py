"""Sums of a linear that are split over programs: how many parts they have, and the kernel that adds these up.

Few output channels make few programs, each of which would read long rows alone while most multiprocessors idle. Parts
are added in the order of their numbers, so results are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

MIN_TILES = 4
"""The fewest tiles of a part: for shorter parts, writing and adding take longer than reading."""

WARPS_OF_A_MULTIPROCESSOR = 8
"""The warps for which sums are split, so that some load while others multiply."""

BLOCK = 256
"""The columns of a program that adds parts."""


def num_parts(
    programs: int,
    num_tiles: int,
    *,
    num_warps: int,
    part_bytes: int,
    weight_bytes: int,
    sms: int,
    warps_of_sm: int = WARPS_OF_A_MULTIPROCESSOR,
) -> int:
    """Return into how many parts sums are split, 1 if that does not pay.

    `programs`: without a split, of `num_warps` each; `num_tiles`: of a sum; `part_bytes`: of all sums of one part;
    `weight_bytes`: of what is read. Parts, which are written and read again, may have as many bytes as the weights.
    """
    wanted = round(warps_of_sm * sms / (programs * num_warps))
    affordable = weight_bytes // max(2 * part_bytes, 1)
    return max(min(wanted, num_tiles // MIN_TILES, affordable), 1)


def add_parts_on_gpu(
    parts: torch.Tensor,  # [parts, num_rows, num_columns] float32 or int32
    out: torch.Tensor,  # [num_rows, num_columns], written
    *,
    scale: torch.Tensor | None = None,  # [row blocks, 1]
    block_rows: int = 1,
    step: torch.Tensor | None = None,  # [num_rows, 1]
    bias: torch.Tensor | None = None,  # [num_columns]
) -> None:
    """Write the sum of `parts` times the scales of columns and rows, plus `bias`, into `out`."""
    parts_of_sum, num_rows, num_columns = parts.shape
    _add_parts.launch(
        (triton.cdiv(num_columns, BLOCK), num_rows, 1),
        (parts, scale, step, bias, out, num_rows, num_columns, parts_of_sum),
        {"BLOCK_ROWS": block_rows, "BLOCK": BLOCK},
        num_warps=2,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    parts,  # [num_parts, num_rows, num_columns]
    scale,  # [row blocks], or None
    step,  # [num_rows], or None
    bias,  # [num_columns], or None
    out,  # [num_rows, num_columns], written
    num_rows,
    num_columns,
    num_parts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of columns, rows)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_column = column < num_columns
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(parts + row * num_columns + column, mask=is_column, other=0)
    for part in range(1, num_parts):
        total += tl.load(parts + (part * num_rows + row) * num_columns + column, mask=is_column, other=0)
    wide = total.to(tl.float32)
    if scale is not None:
        wide *= tl.load(scale + column // BLOCK_ROWS, mask=is_column, other=0.0).to(tl.float32)
    if step is not None:
        wide *= tl.load(step + row)
    if bias is not None:
        wide += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + column, wide.to(out.dtype.element_ty), mask=is_column)


_add_parts = OverlappedKernel(add_parts_kernel)
