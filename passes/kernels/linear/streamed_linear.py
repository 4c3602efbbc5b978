"""Linears of few rows and large weights: weights stream through shared memory into the tensor cores' left operand.

A Hopper tensor core takes 64 rows of its left operand from shared memory and eight columns or more of the right one.
So the weight stands on the left, which costs no registers and no copies, and `x`, few rows of it, on the right. As
many tiles of the weight as fit are on their way before the preceding kernel has ended (`ptx.py`), and all the
time: the kernel is as fast as memory is read.

Source: the shapes of `wgmma` in PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import wait_for_preceding_kernel
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig


def streamed_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: StreamedConfig,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, or with an activation `act(gate) * up` of its halves: `[num_rows, num_columns]`."""
    assert config.num_parts == 1
    out = x.new_empty((x.shape[0], weight.shape[0] // (2 if activation else 1)))
    _launch(x, weight, bias, out, activation, config)
    return out


def streamed_parts_on_gpu(x: torch.Tensor, weight: torch.Tensor, config: StreamedConfig) -> torch.Tensor:
    """Return float32 `[num_parts, num_rows, num_columns]`, whose sum over parts is `x @ weight.T`."""
    parts = x.new_empty((config.num_parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    _launch(x, weight, None, parts, "", config)
    return parts


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    config: StreamedConfig,
) -> None:
    num_rows, size = x.shape
    num_columns = out.shape[-1]
    assert size % (config.block_k * config.num_parts) == 0, (size, config)  # an empty part would write and not wait
    num_tiles = size // config.block_k // config.num_parts
    _streamed.launch(
        (triton.cdiv(num_columns, config.num_columns), config.num_parts, 1),
        (x, weight, bias, out, num_columns, size, num_rows, num_tiles),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "COLUMNS": config.num_columns,
            "JOINED": config.is_joined,
            "BLOCK_K": config.block_k,
            "STAGES": config.num_stages,
            "ACTIVATION": activation,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def streamed_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, size], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    out,  # [num_rows, num_columns], or float32 [parts, num_rows, num_columns]; written
    num_columns,
    size,  # a multiple of BLOCK_K
    num_rows,  # at most BLOCK_M
    num_tiles,  # of a part: BLOCK_K numbers each
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # lines of the tensor cores' left operand
    COLUMNS: tl.constexpr,  # of the result a program, and as many lines that are read; the others are zero
    JOINED: tl.constexpr,  # half of the lines are the gate's, the others the other half's; else each has a tile
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, parts). Sums in float32."""
    if OVERLAP:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION != ""
    HALF: tl.constexpr = BLOCK_N // 2 if JOINED else BLOCK_N
    part = tl.program_id(1)
    line = tl.arange(0, BLOCK_N)  # of the tensor cores' left operand
    column = tl.program_id(0) * COLUMNS + line % HALF
    is_column = (line % HALF < COLUMNS) & (column < num_columns)
    weight_row = column
    if JOINED:
        weight_row += line // HALF * num_columns
    row = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    first = part * num_tiles * BLOCK_K
    end = tl.minimum(first + num_tiles * BLOCK_K, size)
    weights = weight + weight_row[:, None].to(tl.int64) * size + at[None, :]
    others = weights + num_columns.to(tl.int64) * size
    here = row[:, None].to(tl.int64) * size + at[None, :]
    is_row = (row < num_rows)[:, None]
    values = tl.zeros([BLOCK_M, BLOCK_K], x.dtype.element_ty)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    other_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        w = tl.load(weights + start, mask=is_column[:, None], other=0.0)
        if GATED and not JOINED:
            u = tl.load(others + start, mask=is_column[:, None], other=0.0)
        if start == first:  # the first tiles of the weight are on their way
            if OVERLAP:
                wait_for_preceding_kernel()
            values = tl.load(x + here + start, mask=is_row, other=0.0)
        v = tl.trans(values)
        num_ahead = tl.where(start + BLOCK_K < end, num_rows, 0)
        values = tl.load(x + here + start + BLOCK_K, mask=(row < num_ahead)[:, None], other=0.0)
        sums = tl.dot(w, v, sums)
        if GATED and not JOINED:
            other_sums = tl.dot(u, v, other_sums)
    if bias is not None:
        sums += tl.load(bias + weight_row, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if GATED and not JOINED:
            other_sums += tl.load(bias + num_columns + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if JOINED:
        sums, other_sums = tl.split(tl.permute(tl.reshape(sums, [2, HALF, BLOCK_M]), [1, 2, 0]))
        line = tl.arange(0, HALF)
        column = tl.program_id(0) * COLUMNS + line
        is_column = (line < COLUMNS) & (column < num_columns)
    if GATED:
        sums = gated(sums, other_sums, ACTIVATION)
    to = out + (part * num_rows + row[None, :]).to(tl.int64) * num_columns + column[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & is_column[:, None])


_streamed = OverlappedKernel(streamed_kernel)
