"""Linears over 4-bit weights in words (`words.py`), whose inputs are floats of 16 bits.

A shift, a mask and a multiply-add turn a word into two weights in bfloat16, scaled and rounded once, which tensor
cores take as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import prefetch
from piecegraph.passes.kernels.quantised.split_sums import add_parts_on_gpu, num_parts
from piecegraph.passes.kernels.quantised.weight_tiles import stages_that_fit
from piecegraph.passes.kernels.quantised.words import WORD_COLUMNS

MAX_WORD_ROWS = 256
"""The most rows that are multiplied by weights in words; more pay for a copy of a part of the weights in floats."""

WARPS_OF_A_MULTIPROCESSOR = 16
"""The warps for which sums are split: a program waits for its tensor cores eight times in a block of 128 columns."""

LARGE_BYTES = 16 * 2**20
"""The bytes of words above which 33 to 64 rows are multiplied by 128 output channels at one time, else by 64."""

FLOAT_BYTES = 64 * 2**20
"""The most bytes of weights that are floats at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordTiles:
    """The rows and the output channels of a program, and how it runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_columns: int) -> int:
        """Return the tiles of the output."""
        return -(-num_columns // self.block_n) * -(-num_rows // self.block_m)


def pick_word_tiles(num_rows: int, num_bytes: int, shared_bytes: int) -> WordTiles:
    """Return the tiles for `num_rows` and words of `num_bytes`, by a sweep on an H200.

    The fewer the rows, the more stages: the smaller is the share of the inputs in what a stage holds. `shared_bytes` of
    a program bound them.
    """
    if num_rows <= 16:
        block_m, block_n, num_warps, stages = 16, 64, 4, 6
    elif num_rows <= 32:
        block_m, block_n, num_warps, stages = 32, 64, 4, 4
    elif num_rows <= 64 and num_bytes > LARGE_BYTES:
        block_m, block_n, num_warps, stages = 64, 128, 8, 4
    elif num_rows <= 64:
        block_m, block_n, num_warps, stages = 64, 64, 4, 3
    else:
        block_m, block_n, num_warps, stages = 128, 128, 8, 3
    # Words, floats of 16 bits, and scales with offsets for each of four groups, the most that there are.
    stage_bytes = block_n * WORD_COLUMNS // 2 + block_m * WORD_COLUMNS * 2 + block_n * 4 * 4
    num_stages = stages_that_fit(stages, stage_bytes, shared_bytes)
    return WordTiles(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


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
    gpu = limits_of(x.device)
    tiles = pick_word_tiles(num_rows, words.nbytes, gpu.shared_bytes)
    blocks = size // WORD_COLUMNS
    parts = num_parts(
        tiles.num_programs(num_rows, num_columns),
        blocks,
        num_warps=tiles.num_warps,
        part_bytes=out.numel() * 4,
        weight_bytes=words.nbytes,
        sms=gpu.num_sms,
        warps_of_sm=WARPS_OF_A_MULTIPROCESSOR,
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
            "PACKED_MATH": x.is_cuda and x.dtype is torch.bfloat16,
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
def scaled_factors(pair, PACKED_MATH: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the factor and the offset of a group for `weights_of_run`; `pair` has a scale and an offset.

    With packed math they are the scale times 2 ** 110 and the offset times 2 ** -23, twice each. A multiply-add of -0
    gives the bits of a product, and sm_80 has it: a multiply of two bfloat16 needs sm_90.
    """
    if PACKED_MATH:
        factor = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, up, zero;
            prmt.b32 s, $1, $1, 0x1010;
            mov.b32 up, 0x76807680;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, s, up, zero;
            }""",
            "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        offset = tl.inline_asm_elementwise(
            """{
            .reg .b32 o, down, zero;
            prmt.b32 o, $1, $1, 0x3232;
            mov.b32 down, 0x34003400;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, o, down, zero;
            }""",
            "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        factor = (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        offset = (pair >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return factor, offset


@own_kernel
@triton.jit
def weights_of_run(  # type: ignore[no-untyped-def]  # compiled by Triton
    words,  # [rows, 16]
    factor,  # [rows]
    offset,  # [rows]
    RUN: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the weights of a run of columns, `[rows, 32]` in `dtype`; with packed math each times 2 ** -23.

    Four bits alone are a subnormal number in bfloat16, the value times 2 ** -133. One instruction for two of them
    multiplies by the scale times 2 ** 110, adds the offset and rounds once.
    """
    moved = words >> (4 * RUN)
    if PACKED_MATH:
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 v; and.b32 v, $1, 0x000F000F; fma.rn.bf16x2 $0, v, $2, $3; }",
            "=r,r,r,r", [moved, factor[:, None], offset[:, None]], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        low = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        low = ((moved & 15).to(tl.float32) * factor[:, None] + offset[:, None]).to(dtype)
        high = ((moved >> 16 & 15).to(tl.float32) * factor[:, None] + offset[:, None]).to(dtype)
    return tl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])


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
    PACKED_MATH: tl.constexpr,  # of two bfloat16 in a register; the interpreter has none
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
            pair = tl.load(scales + at, mask=is_column, other=0)
            factor, offset = scaled_factors(pair, PACKED_MATH, dtype)
            for run in tl.static_range(group * RUNS, (group + 1) * RUNS):
                v = tl.load(values + block * 128 + run * 32, mask=is_row[:, None], other=0.0)
                w = weights_of_run(stored, factor, offset, run, PACKED_MATH, dtype)
                total = tl.dot(w, tl.trans(v), total)
    if PACKED_MATH:
        total *= 8388608.0  # 2 ** 23
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
        factor, offset = scaled_factors(pair, False, dtype)
        w = weights_of_run(stored, factor, offset, run, False, dtype)
        to = out + column[:, None].to(tl.int64) * size + block * 128 + run * 32 + tl.arange(0, 32)[None, :]
        tl.store(to, w, mask=is_column[:, None])


_word_linear = OverlappedKernel(word_linear_kernel)
_floats_of_words = OverlappedKernel(floats_of_words_kernel)
