"""Linears whose weights are quantised and whose inputs are floats.

A tile of weights becomes floats in registers and is multiplied there, so that only the stored bytes are read. Many rows
(`MAX_STREAMED_ROWS`) are worth a copy of a part of the weights in floats, which the library multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.quantised.split_sums import add_parts_on_gpu, num_parts
from piecegraph.passes.kernels.quantised.weight_tiles import (
    Tiles,
    WeightLayout,
    scaled_tile,
    stages_that_fit,
    streamed_product,
    unpacked_floats,
)

MAX_STREAMED_ROWS = 256
"""The most rows whose product reads weights of 8 bits as they are stored."""

MAX_STREAMED_PACKED_ROWS = 64
"""The same for weights of 4 bits, which cost each block of rows more work to unpack."""

FLOAT_BYTES = 64 * 2**20
"""The most bytes of weights that are floats at one time."""


def pick_tiles(num_rows: int, layout: WeightLayout, itemsize: int, shared_bytes: int) -> Tiles | None:
    """Return the tiles for `num_rows`; None if groups fit no tile.

    `itemsize`: bytes of a number of the input; `shared_bytes`: of a program, which bound the stages. Few rows take few
    channels, and their sums may be split (`split_sums.py`), so that all multiprocessors read weights. The sizes were
    the fastest of a sweep on an H200.
    """
    block_m, block_n, num_warps, wanted, stages = _tile_sizes(num_rows, layout, itemsize)
    block_k = layout.block_k(wanted, 32 if layout.is_packed else 16)
    if block_k is None:
        return None
    stage_bytes = block_n * block_k // (2 if layout.is_packed else 1) + block_m * block_k * itemsize
    stage_bytes += layout.scale_bytes(block_n, block_k)
    return Tiles(block_m, block_n, block_k, num_warps, stages_that_fit(stages, stage_bytes, shared_bytes))


def _tile_sizes(num_rows: int, layout: WeightLayout, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return rows, output channels, warps, columns of the input that are wanted, and stages."""
    is_narrow = layout.num_columns <= 4096
    if num_rows <= 16 and layout.is_packed:
        sizes = (16, 16, 2, 256, 4) if layout.num_columns < 4096 else (16, 32, 4, 256, 4)
    elif num_rows <= 16:
        sizes = (16, 32, 2, 256, 4) if is_narrow else (16, 32, 2, 128, 6)
    elif num_rows <= 64:
        sizes = (triton.next_power_of_2(num_rows), 64, 4, 128, 6 if is_narrow and num_rows <= 32 else 4)
    elif num_rows <= 128 or layout.group:
        sizes = (128, 64, 4, 128, 3)
    else:
        sizes = (256, 128, 8, 64, 4)
    if itemsize == 4:  # sums of float32 products have no tensor cores, and their operands twice the bytes
        block_m, block_n, num_warps, wanted, _ = sizes if num_rows <= 64 else (128, 64, 4, 64, 2)
        sizes = (block_m, block_n, num_warps, min(wanted, 64), 2)
    return sizes


def weights_only_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size]
    weight: torch.Tensor,
    scale: torch.Tensor,  # [row blocks, groups] or, with offsets, [row blocks, groups, 2], contiguous
    bias: torch.Tensor | None,
    block: Sequence[int],  # output channels and columns of the input that share a scale; 0 columns: all
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return `x @ w.T + bias` in `dtype`, `[num_rows, num_columns]`; None if the groups of weights fit no tile."""
    layout = WeightLayout.of(weight, scale, block)
    num_rows = x.shape[0]
    gpu = limits_of(x.device)
    tiles = pick_tiles(num_rows, layout, x.element_size(), gpu.shared_bytes)
    if tiles is None:
        return None
    if num_rows > (MAX_STREAMED_PACKED_ROWS if layout.is_packed else MAX_STREAMED_ROWS):
        return _by_the_library(x, weight, scale, bias, layout, dtype)
    out = x.new_empty((num_rows, layout.num_columns), dtype=dtype)
    if num_rows == 0:
        return out
    tiles_of_sum = triton.cdiv(layout.size, tiles.block_k)
    parts = num_parts(
        tiles.num_programs(num_rows, layout.num_columns),
        tiles_of_sum,
        num_warps=tiles.num_warps,
        part_bytes=out.numel() * 4,
        weight_bytes=weight.nbytes,
        sms=gpu.num_sms,
    )
    sums = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    sizes = (
        layout.num_columns,
        layout.size,
        weight.shape[1],
        scale.shape[1],
        num_rows,
        triton.cdiv(tiles_of_sum, parts),
    )
    tiles.launch(
        _weights_only,
        num_rows,
        layout.num_columns,
        (x.contiguous(), weight, scale, bias if parts == 1 else None, sums, *sizes),
        {**_constants(layout, tiles.block_k), "PACKED_MATH": x.is_cuda and x.dtype is torch.bfloat16},
        num_parts=parts,
    )
    if parts > 1:
        add_parts_on_gpu(sums, out, bias=bias)
    return out


def dequantised_on_gpu(
    weight: torch.Tensor, scale: torch.Tensor, layout: WeightLayout, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights in `dtype`, `[rows of weight, size]`. `scale` begins with the first row of `weight`."""
    num_columns = weight.shape[0]
    out = torch.empty((num_columns, layout.size), dtype=dtype, device=weight.device)
    block_k = layout.block_k(128, 2)
    assert block_k is not None, layout
    _dequantise.launch(
        (triton.cdiv(num_columns, 32), triton.cdiv(layout.size, block_k), 1),
        (weight, scale, out, num_columns, layout.size, scale.shape[1]),
        {"BLOCK_N": 32, "BLOCK_K": block_k, **_constants(layout, block_k)},
        num_warps=4,
    )
    return out


def _constants(layout: WeightLayout, block_k: int) -> dict[str, Any]:
    """Return what a kernel is compiled for, of weights that it reads in tiles of `block_k` columns."""
    return {
        "PACKED": 2 if layout.is_packed else 1,
        "GROUP": layout.group,
        "GROUPS": layout.groups_in(block_k),
        "BLOCK_ROWS": layout.block_rows,
        "HAS_OFFSET": layout.has_offset,
    }


def _by_the_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: WeightLayout,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply by a part of the channels after another, whose weights are floats meanwhile."""
    out = x.new_empty((x.shape[0], layout.num_columns), dtype=dtype)
    at_once = max(FLOAT_BYTES // (layout.size * x.element_size()) // layout.block_rows, 1) * layout.block_rows
    for first in range(0, layout.num_columns, at_once):
        part = slice(first, min(first + at_once, layout.num_columns))
        scales = scale[first // layout.block_rows :]
        floats = dequantised_on_gpu(weight[part], scales, layout, x.dtype)
        out[:, part] = F.linear(x, floats, None if bias is None else bias[part].to(x.dtype))
    return out


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def weights_only_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, length]
    scale,  # [row blocks, num_groups], or [row blocks, num_groups, 2]
    bias,  # [num_columns], or None
    out,  # [parts, num_rows, num_columns], written
    num_columns,
    size,
    length,  # size / PACKED; an argument, so that Triton knows whether it is a multiple of 16
    num_groups,
    num_rows,
    num_tiles,  # of a part
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,  # values in a byte
    GROUP: tl.constexpr,  # columns with one scale; 0: all
    GROUPS: tl.constexpr,  # in BLOCK_K columns, 1 or more
    BLOCK_ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, row blocks, parts)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    is_column, is_row = column < num_columns, row < num_rows
    weights = weight + column.to(tl.int64) * length
    scales = scale + (column // BLOCK_ROWS).to(tl.int64) * num_groups * (2 if HAS_OFFSET else 1)
    values = x + row.to(tl.int64) * size
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = streamed_product(
        values,
        is_row,
        weights,
        scales,
        is_column,
        size,
        length,
        num_groups,
        part * num_tiles,
        (part + 1) * num_tiles,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        PACKED,
        GROUP,
        GROUPS,
        HAS_OFFSET,
        PACKED_MATH,
    )
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + (part * num_rows + row[None, :]).to(tl.int64) * num_columns + column[:, None],
        total.to(out.dtype.element_ty),
        mask=is_row[None, :] & is_column[:, None],
    )


@own_kernel
@triton.jit(do_not_specialize=["num_columns"])
def dequantise_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    weight,  # [num_columns, size / PACKED]
    scale,  # [row blocks, num_groups], or [row blocks, num_groups, 2]
    out,  # [num_columns, size], written
    num_columns,
    size,
    num_groups,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, blocks of BLOCK_K columns of the input)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    is_column = column < num_columns
    COLUMNS: tl.constexpr = BLOCK_K // PACKED
    at = start // PACKED + tl.arange(0, COLUMNS)
    length = size // PACKED
    scales = scale + (column // BLOCK_ROWS).to(tl.int64) * num_groups * (2 if HAS_OFFSET else 1)
    group = start // GROUP if GROUP > 0 else 0
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    stored = tl.load(
        weight + column[:, None].to(tl.int64) * length + at[None, :],
        mask=is_column[:, None] & (at < length)[None, :],
        other=0.0,
    )
    values = unpacked_floats(stored, PACKED, False)
    w = scaled_tile(values, scales, is_column, group, num_groups, BLOCK_N, BLOCK_K, GROUPS, HAS_OFFSET)
    to = start + tl.arange(0, BLOCK_K)
    tl.store(
        out + column[:, None].to(tl.int64) * size + to[None, :],
        w.to(out.dtype.element_ty),
        mask=is_column[:, None] & (to < size)[None, :],
    )


_weights_only = OverlappedKernel(weights_only_kernel)
_dequantise = OverlappedKernel(dequantise_kernel)
