"""Linears of two to 16 rows on tensor cores, each warp with its own slice of every row's numbers.

A weight of a few megabytes is read once, by one program on each multiprocessor; latency takes most of the time. So a
program requests all that it reads of the weight before it waits for the preceding kernel (`overlapped.py`): as many
tiles as registers hold, the others to L2. Sliced over warps, a tile is wide for reading memory and short for the sums
of the tensor cores; the warps' sums are added once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import prefetch
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.linear.linear_config import SlicedConfig


def sliced_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: SlicedConfig,  # for at least num_rows rows
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, or with an activation `act(gate) * up` of its halves: `[num_rows, num_columns]`."""
    num_rows, size = x.shape
    num_columns = weight.shape[0] // (2 if activation else 1)
    out = x.new_empty((num_rows, num_columns))
    _sliced.launch(
        (triton.cdiv(num_columns, config.block_n), 1, 1),
        (x, weight, bias, out, num_columns, size, num_rows),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SLICES": config.num_slices,
            "BLOCK_K": config.block_k,
            "TILES": config.num_tiles,
            "HELD": config.num_held,
            "ACTIVATION": activation,
        },
        num_warps=config.num_slices,
        num_stages=1,
    )
    return out


@own_kernel
@triton.jit(do_not_specialize=["num_rows"])
def sliced_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, size], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    out,  # [num_rows, num_columns], written
    num_columns,
    size,  # TILES * SLICES * BLOCK_K
    num_rows,  # at most BLOCK_M
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of a slice
    TILES: tl.constexpr,
    HELD: tl.constexpr,  # tiles that registers hold before the wait, one to three
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks,). Sums in float32."""
    TILE: tl.constexpr = SLICES * BLOCK_K
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read_column = tl.minimum(column, num_columns - 1).to(tl.int64) * size
    row = tl.arange(0, BLOCK_M)
    at = (tl.arange(0, SLICES) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    weights = weight + read_column[None, :, None] + at[:, None, :]  # [SLICES, BLOCK_N, BLOCK_K]
    others = weights + num_columns.to(tl.int64) * size
    values = x + row[None, :, None].to(tl.int64) * size + at[:, None, :]  # [SLICES, BLOCK_M, BLOCK_K]
    is_row = (row < num_rows)[None, :, None]

    if OVERLAP:
        gdc_launch_dependents()
    w0 = tl.load(weights)
    if ACTIVATION != "":
        u0 = tl.load(others)
    if HELD > 1:
        w1 = tl.load(weights + TILE)
        if ACTIVATION != "":
            u1 = tl.load(others + TILE)
    if HELD > 2:
        w2 = tl.load(weights + 2 * TILE)
        if ACTIVATION != "":
            u2 = tl.load(others + 2 * TILE)
    if OVERLAP:
        line = read_column[:, None] + (tl.arange(0, TILE // 64) * 64)[None, :]  # of 128 bytes
        for tile in tl.static_range(HELD, TILES):
            prefetch(weight + line + tile * TILE)
            if ACTIVATION != "":
                prefetch(weight + num_columns.to(tl.int64) * size + line + tile * TILE)
        gdc_wait()

    v0 = tl.load(values, mask=is_row, other=0.0)
    if HELD > 1:
        v1 = tl.load(values + TILE, mask=is_row, other=0.0)
    if HELD > 2:
        v2 = tl.load(values + 2 * TILE, mask=is_row, other=0.0)
    sums = _added(tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32), v0, w0)
    if ACTIVATION != "":
        other_sums = _added(tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32), v0, u0)
    if HELD > 1:
        sums = _added(sums, v1, w1)
        if ACTIVATION != "":
            other_sums = _added(other_sums, v1, u1)
    if HELD > 2:
        sums = _added(sums, v2, w2)
        if ACTIVATION != "":
            other_sums = _added(other_sums, v2, u2)
    for start in range(HELD * TILE, size, TILE):
        v = tl.load(values + start, mask=is_row, other=0.0)
        sums = _added(sums, v, tl.load(weights + start))
        if ACTIVATION != "":
            other_sums = _added(other_sums, v, tl.load(others + start))

    is_column = column < num_columns
    total = tl.sum(sums, 0)
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        other_total = tl.sum(other_sums, 0)
        if bias is not None:
            other_total += tl.load(bias + num_columns + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        total = gated(total, other_total, ACTIVATION)
    tl.store(
        out + row[:, None].to(tl.int64) * num_columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < num_rows)[:, None] & is_column[None, :],
    )


@own_kernel
@triton.jit
def _added(sums, values, weights):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return `sums` plus each slice's products: `[S, M, K]` by `[S, N, K]` to `[S, M, N]`."""
    return tl.dot(values, tl.permute(weights, (0, 2, 1)), sums)


_sliced = OverlappedKernel(sliced_kernel)
