"""The layout and tiles of quantised weights in kernels, and the conversion of a tile to floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """A weight `[num_columns, size]` in int8, in e4m3, or in uint8 with two neighbouring values of 4 bits in a byte.

    A scale, and perhaps an offset behind it, stands for `block_rows` output channels and `group` columns of the input.
    Scales in uint8 are powers of two (E8M0), of values in E2M1.
    """

    num_columns: int
    size: int
    is_packed: bool  # two values in a byte, the first in the low bits
    group: int  # 0: a scale for the whole row
    block_rows: int
    has_offset: bool

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> WeightLayout:
        """Return the layout of a weight whose scales are `[row blocks, groups]`, or `[row blocks, groups, 2]`."""
        is_packed = weight.dtype is torch.uint8
        group = block[1] if scale.shape[1] > 1 else 0
        size = weight.shape[1] * (2 if is_packed else 1)
        return cls(
            num_columns=weight.shape[0],
            size=size,
            is_packed=is_packed,
            group=group,
            block_rows=block[0],
            has_offset=scale.ndim == 3,
        )

    def block_k(self, wanted: int, least: int) -> int | None:
        """Return how many columns of the input a tile has, so that tiles and groups do not cross; None: impossible."""
        block = wanted
        while block >= least:
            if self.group == 0 or self.group % block == 0 or block % self.group == 0:
                return block
            block //= 2
        return None

    def scale_bytes(self, block_n: int, block_k: int) -> int:
        """Return the most bytes of scales and offsets that a tile of weights reads, if they are float32."""
        if not self.group and not self.has_offset:
            return 0  # of a whole row, read once
        return block_n * self.groups_in(block_k) * (8 if self.has_offset else 4)

    def groups_in(self, block_k: int) -> int:
        """Return the groups in a tile of `block_k` columns; 1 if they are larger than the tile."""
        return max(block_k // self.group, 1) if self.group else 1


HELD_BYTES = 164 * 2**10
"""The shared memory of a program above which a GPU's tensor cores (Hopper's, and Blackwell's but for GeForce) read
tiles from there, so that the tile at work is held beside those on their way. Others take it into registers first."""


def stages_that_fit(wanted: int, stage_bytes: int, shared_bytes: int) -> int:
    """Return how many stages a loop has, at most `wanted` and at least 1, in `shared_bytes` of a program.

    `stage_bytes`: of the tiles that a turn of the loop reads.
    """
    at_work = 0 if shared_bytes >= HELD_BYTES else 1  # stages that take no shared memory
    return max(min(wanted, shared_bytes // stage_bytes + at_work), 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows, the output channels and the input's columns of a program of a linear, and how it runs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_columns: int) -> int:
        """Return the tiles of the output."""
        return -(-num_columns // self.block_n) * -(-num_rows // self.block_m)

    def launch(
        self,
        kernel: OverlappedKernel,
        num_rows: int,
        num_columns: int,
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        *,
        num_parts: int = 1,
    ) -> None:
        """Launch a program for each tile of the output and each part of its sums.

        `constants` are those behind the kernel's tile sizes.
        """
        kernel.launch(
            (triton.cdiv(num_columns, self.block_n), triton.cdiv(num_rows, self.block_m), num_parts),
            arguments,
            {
                "BLOCK_M": self.block_m,
                "BLOCK_N": self.block_n,
                "BLOCK_K": self.block_k,
                "STAGES": self.num_stages,
                **constants,
            },
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


@own_kernel
@triton.jit
def floats(stored):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return stored values, int8 or e4m3, in float32.

    An integer is added to the bits of 1.5 * 2 ** 23, whose last bit is worth 1: an eighth of the time that the GPU's
    own conversion of integers takes.
    """
    if stored.dtype == tl.int8:
        wide = (stored.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    else:
        wide = stored.to(tl.float32)
    return wide


@own_kernel
@triton.jit
def bfloat16_of_int8(stored):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return int8 values over 128 in bfloat16, exactly: five instructions for four of them, and fourteen through
    float32.

    A byte without sign, which is its value plus 128, is as bits of bfloat16 that number times 2 ** -133. One
    multiply-add of two such numbers gives `(value + 128) / 128 - 1`.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, low, high, up, off;
        xor.b32 u, $2, 0x80808080;
        prmt.b32 low, u, 0, 0x4140;
        prmt.b32 high, u, 0, 0x4342;
        mov.b32 up, 0x7E807E80;
        mov.b32 off, 0xBF80BF80;
        fma.rn.bf16x2 $0, low, up, off;
        fma.rn.bf16x2 $1, high, up, off;
        }""",
        "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@own_kernel
@triton.jit
def nibble(stored, PART: tl.constexpr, IS_E2M1: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the value in the low (PART 0) or the high bits of each byte as int8; of E2M1, twice the value."""
    code = (stored >> (4 * PART)) & 15
    if IS_E2M1:
        low = code & 7
        twice = tl.where(low < 2, low, (2 + (low & 1)) << (tl.maximum(low >> 1, 1) - 1)).to(tl.int8)
        value = tl.where(code > 7, -twice, twice)
    else:
        value = code.to(tl.int8)
    return value


@own_kernel
@triton.jit
def unpacked_floats(  # type: ignore[no-untyped-def]  # compiled by Triton
    stored, PACKED: tl.constexpr, IS_E2M1: tl.constexpr
):
    """Return stored values in float32, in the order of the input's columns, `[BLOCK_N, PACKED * bytes]`.

    The two values of a byte are neighbours, so that a thread has the columns that follow each other in its bytes.
    """
    if PACKED == 2:
        wide = tl.interleave(floats(nibble(stored, 0, IS_E2M1)), floats(nibble(stored, 1, IS_E2M1)))
    else:
        wide = floats(stored)
    return wide


@own_kernel
@triton.jit
def scaled_tile(  # type: ignore[no-untyped-def]  # compiled by Triton
    values,  # [BLOCK_N, COLUMNS] float32
    scales,  # [BLOCK_N] pointers to the first scale of each output channel
    is_column,  # [BLOCK_N]
    first_group,
    num_groups,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # in the tile
    HAS_OFFSET: tl.constexpr,
):
    """Return the weights of a tile in float32: each value times its group's scale, plus its offset.

    A scale and its offset are loaded together.
    """
    group = first_group + tl.arange(0, GROUPS)
    is_there = is_column[:, None] & (group < num_groups)[None, :]
    grouped = values.reshape([BLOCK_N, GROUPS, COLUMNS // GROUPS])
    if HAS_OFFSET:
        pairs = scales[:, None, None] + group[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        step, offset = tl.split(tl.load(pairs, mask=is_there[:, :, None], other=0.0).to(tl.float32))
        grouped = grouped * step[:, :, None] + offset[:, :, None]
    else:
        step = tl.load(scales[:, None] + group[None, :], mask=is_there, other=0)
        if step.dtype == tl.uint8:  # the exponent of a power of two; the values are twice those of E2M1
            step = (step.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
        else:
            step = step.to(tl.float32)
        grouped = grouped * step[:, :, None]
    return grouped.reshape([BLOCK_N, COLUMNS])


@own_kernel
@triton.jit
def streamed_product(  # type: ignore[no-untyped-def]  # compiled by Triton
    inputs,  # [BLOCK_M] pointers to the first number of each row
    is_row,  # [BLOCK_M]
    weights,  # [BLOCK_N] pointers to the first stored value of each output channel
    scales,  # [BLOCK_N] pointers to the first scale of each output channel
    is_column,  # [BLOCK_N]
    size,
    length,  # stored bytes of a row: size / PACKED
    num_groups,
    first_tile,  # of BLOCK_K columns
    end_tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,  # values in a byte
    GROUP: tl.constexpr,  # columns with one scale; 0: all
    GROUPS: tl.constexpr,  # in BLOCK_K columns, 1 or more
    HAS_OFFSET: tl.constexpr,
    PACKED_MATH: tl.constexpr = False,  # of two bfloat16 in a register; the interpreter has none
):
    """Return the products of rows and output channels over some tiles of columns, `[BLOCK_N, BLOCK_M]` float32.

    Weights are the left operand, which tensor cores take from registers. Inputs and stored bytes are read without gaps:
    values of 4 bits are put in the order of their columns.
    """
    COLUMNS: tl.constexpr = BLOCK_K // PACKED
    IS_E2M1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    IS_SCALED_LATER: tl.constexpr = GROUP == 0 and not HAS_OFFSET and not IS_E2M1
    IS_CONVERTED: tl.constexpr = PACKED_MATH and IS_SCALED_LATER and weights.dtype.element_ty == tl.int8
    at = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        byte, column = tile * COLUMNS + tl.arange(0, COLUMNS), tile * BLOCK_K + at
        stored = tl.load(
            weights[:, None] + byte[None, :], mask=is_column[:, None] & (byte < length)[None, :], other=0.0
        )
        v = tl.load(inputs[:, None] + column[None, :], mask=is_row[:, None] & (column < size)[None, :], other=0.0)
        if IS_CONVERTED:
            w = bfloat16_of_int8(stored)
        else:
            w = unpacked_floats(stored, PACKED, IS_E2M1)
        if not IS_SCALED_LATER:
            group = tile * BLOCK_K // GROUP if GROUP > 0 else 0
            w = scaled_tile(w, scales, is_column, group, num_groups, BLOCK_N, BLOCK_K, GROUPS, HAS_OFFSET)
        total = tl.dot(w.to(v.dtype), tl.trans(v), total, input_precision="ieee")
    if IS_CONVERTED:
        total *= 128.0
    if IS_SCALED_LATER:
        total *= tl.load(scales, mask=is_column, other=0.0).to(tl.float32)[:, None]
    return total
