"""Linears over 4-bit weights in words (`words.py`), whose inputs are floats of 16 bits.

A shift and a mask turn a word into two values of 16 bits that tensor cores take as they are: 16 plus the weight's
value, whose bits are the mantissa's. For few rows the products of a group are scaled, so that a weight costs an
instruction; many rows have more products than weights, so that weights are scaled in registers instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import prefetch
from piecegraph.passes.kernels.quantised.split_sums import add_parts_on_gpu, num_parts, num_sms
from piecegraph.passes.kernels.quantised.words import WORD_COLUMNS

MAX_WORD_ROWS = 256
"""The most rows that are multiplied by weights in words; more pay for a copy of a part of the weights in floats."""

FLOAT_BYTES = 64 * 2**20
"""The most bytes of weights that are floats at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordTiles:
    """The rows and the output channels of a program, and how it runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    scales_products: bool  # instead of weights

    def num_programs(self, num_rows: int, num_columns: int) -> int:
        """Return the tiles of the output."""
        return -(-num_columns // self.block_n) * -(-num_rows // self.block_m)


def pick_word_tiles(num_rows: int) -> WordTiles:
    """Return the tiles for `num_rows`."""
    if num_rows <= 64:
        rows = max(triton.next_power_of_2(num_rows), 16)
        return WordTiles(block_m=rows, block_n=64, num_warps=4, num_stages=5, scales_products=True)
    return WordTiles(block_m=128, block_n=128, num_warps=8, num_stages=3, scales_products=False)


def word_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], bfloat16 or float16
    words: torch.Tensor,  # [num_columns, size / 8] int32
    scale: torch.Tensor,  # [num_columns, num_groups, 2] in the dtype of x
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return `x @ w.T + bias` in the dtype of `x`, `[num_rows, num_columns]`.

    Groups have 32 or 64 columns, or as many words as `WORD_COLUMNS` have, or a multiple of them.
    """
    num_rows, size = x.shape
    num_columns, num_groups = scale.shape[:2]
    if num_rows > MAX_WORD_ROWS:
        return _by_the_library(x, words, scale, bias)
    out = x.new_empty((num_rows, num_columns))
    if num_rows == 0:
        return out
    tiles = pick_word_tiles(num_rows)
    blocks = size // WORD_COLUMNS
    parts = num_parts(
        tiles.num_programs(num_rows, num_columns),
        blocks,
        part_bytes=out.numel() * 4,
        weight_bytes=words.nbytes,
        sms=num_sms(x.device),
    )
    sums = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    _word_linear.launch(
        (triton.cdiv(num_columns, tiles.block_n), triton.cdiv(num_rows, tiles.block_m), parts),
        (
            x.contiguous(),
            words,
            scale.view(torch.int32),
            bias if parts == 1 else None,
            sums,
            num_columns,
            size,
            num_groups,
            num_rows,
            triton.cdiv(blocks, parts),
        ),
        {
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "STAGES": tiles.num_stages,
            "GROUP": size // num_groups if num_groups > 1 else 0,
            "SCALES_PRODUCTS": tiles.scales_products,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts > 1:
        add_parts_on_gpu(sums, out, bias=bias)
    return out


def _by_the_library(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by a part of the channels after another, whose weights are floats meanwhile."""
    size = x.shape[1]
    num_columns, num_groups = scale.shape[:2]
    out = x.new_empty((x.shape[0], num_columns))
    at_once = max(FLOAT_BYTES // (size * x.element_size()), 1)
    for first in range(0, num_columns, at_once):
        part = slice(first, min(first + at_once, num_columns))
        floats = x.new_empty((part.stop - first, size))
        _floats_of_words.launch(
            (triton.cdiv(floats.shape[0], 32), size // WORD_COLUMNS, 1),
            (words[part], scale[part].view(torch.int32), floats, floats.shape[0], size, num_groups),
            {"BLOCK_N": 32, "GROUP": size // num_groups if num_groups > 1 else 0},
            num_warps=4,
        )
        out[:, part] = F.linear(x, floats, None if bias is None else bias[part])
    return out


@own_kernel
@triton.jit
def sixteen_and_value(words, RUN: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # by Triton
    """Return 16 plus each value of a run, `[rows, 2 * words]` in `dtype`; a word has two of them."""
    PLACE: tl.constexpr = 3 if dtype == tl.bfloat16 else 6  # of the lowest bit of a value, in the mantissa of 16
    SIXTEENS: tl.constexpr = 0x41804180 if dtype == tl.bfloat16 else 0x4C004C00
    SHIFT: tl.constexpr = 4 * RUN - PLACE
    moved = words >> SHIFT if SHIFT > 0 else words << -SHIFT
    both = (moved & (0x000F000F << PLACE)) | SIXTEENS
    low = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


@own_kernel
@triton.jit
def scale_and_base(pair, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return in float32 the scale of a group, and the weight that a value of -16 would be; `pair`: scale and offset."""
    scale = (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    offset = (pair >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return scale, offset - 16.0 * scale


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def word_linear_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    words,  # [num_columns, size / 8]
    scale,  # [num_columns, num_groups] int32: a scale in the low bits and an offset in the high ones
    bias,  # [num_columns], or None
    out,  # [parts, num_rows, num_columns], written
    num_columns,
    size,
    num_groups,
    num_rows,
    num_blocks,  # of a part, each of 128 columns of the input
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # columns with one scale; 0: all
    SCALES_PRODUCTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, row blocks, parts). Weights are asked for before the wait."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    is_column, is_row = column < num_columns, row < num_rows
    length = size // 128 * 16  # of a row, in words; a multiple of 16, as the compiler sees
    first = part * num_blocks
    end = tl.minimum(first + num_blocks, size // 128)
    rows = words + column[:, None].to(tl.int64) * length + tl.arange(0, 16)[None, :]
    values = x + row[:, None].to(tl.int64) * size + tl.arange(0, 32)[None, :]
    scales = scale + column.to(tl.int64) * num_groups
    dtype: tl.constexpr = x.dtype.element_ty
    RUNS: tl.constexpr = GROUP // 32 if GROUP == 32 or GROUP == 64 else 4  # of a group, in 128 columns
    ones = tl.full([BLOCK_N, 32], 1.0, dtype)
    if OVERLAP:
        gdc_launch_dependents()
        word = tl.minimum(first * 16 + tl.arange(0, 4) * 32, length - 1)  # of a line of 128 bytes
        prefetch(words + tl.minimum(column, num_columns - 1)[:, None].to(tl.int64) * length + word[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        stored = tl.load(rows + block * 16, mask=is_column[:, None], other=0)
        for group in tl.static_range(4 // RUNS):
            at = (block * 128 + group * GROUP) // GROUP if GROUP > 0 else 0
            step, base = scale_and_base(tl.load(scales + at, mask=is_column, other=0), dtype)
            products = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for run in tl.static_range(group * RUNS, (group + 1) * RUNS):
                v = tl.trans(tl.load(values + block * 128 + run * 32, mask=is_row[:, None], other=0.0))
                w = sixteen_and_value(stored, run, dtype)
                if SCALES_PRODUCTS:
                    products = tl.dot(w, v, products)
                    sums = tl.dot(ones, v, sums)
                else:
                    scaled = w.to(tl.float32) * step[:, None] + base[:, None]
                    total = tl.dot(scaled.to(dtype), v, total)
            if SCALES_PRODUCTS:
                total += products * step[:, None] + sums * base[:, None]
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + (part * num_rows + row[None, :]).to(tl.int64) * num_columns + column[:, None],
        total.to(out.dtype.element_ty),
        mask=is_row[None, :] & is_column[:, None],
    )


@own_kernel
@triton.jit(do_not_specialize=["num_columns"])
def floats_of_words_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    words,  # [num_columns, size / 8]
    scale,  # [num_columns, num_groups] int32
    out,  # [num_columns, size], written
    num_columns,
    size,
    num_groups,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, blocks of 128 columns of the input)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    is_column = column < num_columns
    dtype: tl.constexpr = out.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    rows = words + column[:, None].to(tl.int64) * (size // 128 * 16) + tl.arange(0, 16)[None, :]
    stored = tl.load(rows + block * 16, mask=is_column[:, None], other=0)
    for run in tl.static_range(4):
        at = (block * 128 + run * 32) // GROUP if GROUP > 0 else 0
        pair = tl.load(scale + column.to(tl.int64) * num_groups + at, mask=is_column, other=0)
        step, base = scale_and_base(pair, dtype)
        w = sixteen_and_value(stored, run, dtype).to(tl.float32) * step[:, None] + base[:, None]
        to = out + column[:, None].to(tl.int64) * size + block * 128 + run * 32 + tl.arange(0, 32)[None, :]
        tl.store(to, w.to(dtype), mask=is_column[:, None])


_word_linear = OverlappedKernel(word_linear_kernel)
_floats_of_words = OverlappedKernel(floats_of_words_kernel)
