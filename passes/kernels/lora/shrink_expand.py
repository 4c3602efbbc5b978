"""The Triton kernels of `lora_shrink` and `lora_expand`.

A program of shrink or expand has a block of rows, and goes over the slots: a slot that none of its rows uses costs a
comparison. So any mix of adapters runs in one launch, whose grid depends on sizes alone, and a block whose rows share
an adapter, as those of a prompt do, reads its matrices once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

MAX_BLOCK_ROWS = 64
"""The most rows of a program; tensor cores take 16 or more."""

BLOCK_SIZE = 64
"""The columns of the input that shrink multiplies at a time."""

BLOCK_COLUMNS = 64
"""The columns of the output that a program of expand adds to."""


def block_rows(num_rows: int) -> int:
    """Return the rows of a program."""
    rows: int = min(MAX_BLOCK_ROWS, max(16, triton.next_power_of_2(num_rows)))
    return rows


def block_rank(max_rank: int) -> int:
    """Return the power of two, 16 or more, that holds a rank."""
    rank: int = max(16, triton.next_power_of_2(max_rank))
    return rank


def shrink_on_gpu(
    x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Write `x @ a[slot].T` of each row to `out`; see `ops.lora_shrink`. `x` is `[num_rows, size]`."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    rows = block_rows(num_rows)
    _shrink[(triton.cdiv(num_rows, rows),)](
        x,
        x.stride(0),
        a,
        ranks,
        slots,
        out,
        num_rows,
        size,
        a.shape[1],
        NUM_SLOTS=a.shape[0],
        ROWS=rows,
        RANK=block_rank(a.shape[1]),
        BLOCK=BLOCK_SIZE,
        PRECISION=_precision(x),
    )


def expand_on_gpu(
    y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor
) -> None:
    """Add `shrunk @ b[slot].T` to each row of `y`, `[num_rows, num_columns]`; see `ops.lora_expand`."""
    num_rows, num_columns = y.shape
    if num_rows == 0:
        return
    rows = block_rows(num_rows)
    _expand[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, BLOCK_COLUMNS))](
        y,
        y.stride(0),
        shrunk,
        b,
        ranks,
        slots,
        num_rows,
        num_columns,
        b.shape[2],
        NUM_SLOTS=b.shape[0],
        ROWS=rows,
        RANK=block_rank(b.shape[2]),
        BLOCK=BLOCK_COLUMNS,
    )


def _precision(tensor: torch.Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # read for float32 operands only


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "max_rank"])
def _shrink(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    x_stride,
    a,  # [NUM_SLOTS, max_rank, size]
    ranks,  # [NUM_SLOTS] int32
    slots,  # [num_rows] int32
    out,  # [num_rows, max_rank] float32, written up to the rank of a row's adapter
    num_rows,
    size,
    max_rank,
    NUM_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: blocks of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    at_rank = tl.arange(0, RANK)
    for each in range(NUM_SLOTS):
        is_mine = slot == each
        rank = tl.load(ranks + each)
        if (tl.max(is_mine.to(tl.int32), axis=0) > 0) & (rank > 0):
            total = tl.zeros([ROWS, RANK], dtype=tl.float32)
            matrix = a + max_rank.to(tl.int64) * size * each
            for first in range(0, size, BLOCK):
                at = first + tl.arange(0, BLOCK)
                numbers = tl.load(
                    x + row[:, None].to(tl.int64) * x_stride + at[None, :],
                    mask=is_mine[:, None] & (at[None, :] < size),
                    other=0.0,
                )
                weights = tl.load(
                    matrix + at_rank[None, :] * size + at[:, None],
                    mask=(at_rank[None, :] < rank) & (at[:, None] < size),
                    other=0.0,
                )
                total = tl.dot(numbers, weights, total, input_precision=PRECISION)
            tl.store(
                out + row[:, None].to(tl.int64) * max_rank + at_rank[None, :],
                total,
                mask=is_mine[:, None] & (at_rank[None, :] < rank),
            )


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "max_rank"])
def _expand(  # type: ignore[no-untyped-def]  # compiled by Triton
    y,  # [num_rows, num_columns], added to
    y_stride,
    shrunk,  # [num_rows, max_rank] float32
    b,  # [NUM_SLOTS, num_columns, max_rank]
    ranks,  # [NUM_SLOTS] int32
    slots,  # [num_rows] int32
    num_rows,
    num_columns,
    max_rank,
    NUM_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (blocks of rows, blocks of columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    at_rank = tl.arange(0, RANK)
    for each in range(NUM_SLOTS):
        is_mine = slot == each
        rank = tl.load(ranks + each)
        if (tl.max(is_mine.to(tl.int32), axis=0) > 0) & (rank > 0):
            numbers = tl.load(
                shrunk + row[:, None].to(tl.int64) * max_rank + at_rank[None, :],
                mask=is_mine[:, None] & (at_rank[None, :] < rank),
                other=0.0,
            )
            weights = tl.load(
                b + max_rank.to(tl.int64) * num_columns * each + column[None, :] * max_rank + at_rank[:, None],
                mask=(at_rank[:, None] < rank) & (column[None, :] < num_columns),
                other=0.0,
            )
            added = tl.dot(numbers, weights.to(tl.float32), input_precision="ieee")
            place = y + row[:, None].to(tl.int64) * y_stride + column[None, :]
            is_there = is_mine[:, None] & (column[None, :] < num_columns)
            before = tl.load(place, mask=is_there, other=0.0)
            tl.store(place, before + added.to(before.dtype), mask=is_there)
