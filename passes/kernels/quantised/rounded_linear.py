"""Linears whose weights and inputs are both int8, or both e4m3: products of stored values, scaled afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.quantised.split_sums import add_parts_on_gpu, num_parts
from piecegraph.passes.kernels.quantised.weight_tiles import Tiles, WeightLayout, stages_that_fit

MIN_LIBRARY_ROWS = 256
"""The least rows of e4m3 whose product the library computes, if a row and a channel have one scale each; half as many
with more than `WIDE` channels."""

WIDE = 8192
"""The most output channels for which there are few programs with large tiles."""


def pick_rounded_tiles(num_rows: int, layout: WeightLayout, shared_bytes: int) -> Tiles | None:
    """Return the tiles for `num_rows`; None if groups fit no tile.

    `shared_bytes` of a program bound the stages. The sizes were the fastest of a sweep on an H200.
    """
    is_wide, wanted = layout.num_columns > WIDE, 128
    if num_rows <= 64:
        block_m = max(triton.next_power_of_2(num_rows), 16)
        block_n, num_warps, stages = 64, 4, 4 if is_wide or num_rows > 32 else 6
    elif layout.group or (not is_wide and num_rows <= 256):
        block_m, block_n, num_warps, stages = 128, 64, 4, 4
    elif is_wide and 128 < num_rows <= 256:
        block_m, block_n, num_warps, stages = 256, 128, 8, 4
    else:
        block_m, block_n, num_warps, stages = 128, 128, 8, 3
    while layout.group and wanted > layout.group:
        wanted //= 2  # a power of two, as every tile is
    block_k = layout.block_k(wanted, 32)
    if block_k is None:
        return None
    step_bytes = block_m * 4 if layout.group else 0
    stage_bytes = (block_m + block_n) * block_k + layout.scale_bytes(block_n, block_k) + step_bytes
    return Tiles(block_m, block_n, block_k, num_warps, stages_that_fit(stages, stage_bytes, shared_bytes))


def rounded_linear_on_gpu(
    values: torch.Tensor,  # [num_rows, size] int8 or e4m3, contiguous
    step: torch.Tensor,  # [num_rows, 1], or [num_rows, groups of weights] float32
    weight: torch.Tensor,  # [num_columns, size] of the same dtype
    scale: torch.Tensor,  # [row blocks, groups]
    bias: torch.Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return `(values * step) @ (weight * scale).T + bias` in `dtype`; None if no kernel fits the groups."""
    layout = WeightLayout.of(weight, scale, block)
    num_rows, size = values.shape
    gpu = limits_of(values.device)
    tiles = pick_rounded_tiles(num_rows, layout, gpu.shared_bytes)
    if tiles is None or step.shape[1] != scale.shape[1]:
        return None
    if _library_multiplies(num_rows, layout, weight.dtype, dtype):
        scales = scale.float().t().contiguous()
        return torch._scaled_mm(values, weight.t(), step, scales, bias, out_dtype=dtype)
    out = values.new_empty((num_rows, layout.num_columns), dtype=dtype)
    if num_rows == 0:
        return out
    parts = num_parts(
        tiles.num_programs(num_rows, layout.num_columns),
        triton.cdiv(size, tiles.block_k),
        num_warps=tiles.num_warps,
        part_bytes=out.numel() * 4,
        weight_bytes=weight.nbytes,
        sms=gpu.num_sms,
    )
    is_integer = weight.dtype is torch.int8 and layout.group == 0
    sums = out
    if parts > 1:
        sums = out.new_empty((parts, *out.shape), dtype=torch.int32 if is_integer else torch.float32)
    tiles.launch(
        _rounded_linear,
        num_rows,
        layout.num_columns,
        (
            values,
            step,
            weight,
            scale,
            bias,
            sums,
            layout.num_columns,
            size,
            scale.shape[1],
            num_rows,
            triton.cdiv(triton.cdiv(size, tiles.block_k), parts),
        ),
        {"GROUP": layout.group, "BLOCK_ROWS": layout.block_rows, "IS_PART": parts > 1},
        num_parts=parts,
    )
    if parts > 1:
        is_scaled = layout.group > 0
        add_parts_on_gpu(
            sums,
            out,
            scale=None if is_scaled else scale,
            block_rows=layout.block_rows,
            step=None if is_scaled else step,
            bias=bias,
        )
    return out


def _library_multiplies(num_rows: int, layout: WeightLayout, stored: torch.dtype, dtype: torch.dtype) -> bool:
    return (
        stored is torch.float8_e4m3fn
        and dtype is torch.bfloat16
        and num_rows >= (MIN_LIBRARY_ROWS // 2 if layout.num_columns > WIDE else MIN_LIBRARY_ROWS)
        and layout.group == 0
        and layout.block_rows == 1
        and layout.size % 16 == layout.num_columns % 16 == 0
    )


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def rounded_linear_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    values,  # [num_rows, size] int8 or e4m3
    step,  # [num_rows, num_groups] float32
    weight,  # [num_columns, size] of the same dtype
    scale,  # [row blocks, num_groups]
    bias,  # [num_columns], or None
    out,  # [num_rows, num_columns], or of parts [parts, num_rows, num_columns], written
    num_columns,
    size,
    num_groups,
    num_rows,
    num_tiles,  # of a part
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # columns with one scale; 0: all
    BLOCK_ROWS: tl.constexpr,
    IS_PART: tl.constexpr,  # whether whoever adds the parts scales and biases them
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, row blocks, parts). Sums of a group are scaled before the next group's are added.

    Tensor cores of Hopper add up products of e4m3 with 14 bits, so a tile's sum is added to the others in float32.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    is_column, is_row = column < num_columns, row < num_rows
    at = tl.arange(0, BLOCK_K)
    weights = weight + column[:, None].to(tl.int64) * size + at[None, :]
    inputs = values + row[:, None].to(tl.int64) * size + at[None, :]
    scales = scale + (column // BLOCK_ROWS).to(tl.int64) * num_groups
    steps = step + row.to(tl.int64) * num_groups
    IS_INTEGER: tl.constexpr = values.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32 if GROUP > 0 else SUM)
    for tile in tl.range(part * num_tiles, (part + 1) * num_tiles, num_stages=STAGES):
        start = tile * BLOCK_K
        is_inside = (start + at < size)[None, :]
        w = tl.load(weights + start, mask=is_column[:, None] & is_inside, other=0.0)
        v = tl.load(inputs + start, mask=is_row[:, None] & is_inside, other=0.0)
        if GROUP > 0:
            product = tl.dot(w, tl.trans(v), out_dtype=SUM).to(tl.float32)
            group = tl.minimum(start // GROUP, num_groups - 1)  # the last part may end behind it, with zeros
            factor = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
            each = tl.load(steps + group, mask=is_row, other=0.0)
            total += product * factor[:, None] * each[None, :]
        else:
            total = tl.dot(w, tl.trans(v), total, out_dtype=SUM, max_num_imprecise_acc=BLOCK_K)
    wide = total if IS_PART else total.to(tl.float32)
    if GROUP == 0 and not IS_PART:
        wide *= tl.load(scales, mask=is_column, other=0.0).to(tl.float32)[:, None]
        wide *= tl.load(steps, mask=is_row, other=0.0)[None, :]
    if bias is not None and not IS_PART:
        wide += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + (part * num_rows + row[None, :]).to(tl.int64) * num_columns + column[:, None],
        wide.to(out.dtype.element_ty),
        mask=is_row[None, :] & is_column[:, None],
    )


_rounded_linear = OverlappedKernel(rounded_linear_kernel)
