"""Linears of few rows, at the speed at which weights can be read.

Between two such kernels lies one launch, and with it the time until the first weights arrive: at a decode step's sizes
as long as the reading itself. All kernels load their weights before they wait for what the preceding kernel computes
(`overlapped.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import gpu_limits
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import prefetch
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.linear.linear_config import NARROW_COLUMNS, Config, SlicedConfig, linear_config
from piecegraph.passes.kernels.linear.narrow_linear import narrow_linear_on_gpu
from piecegraph.passes.kernels.linear.sliced_linear import sliced_linear_on_gpu
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.passes.kernels.linear.streamed_linear import streamed_linear_on_gpu


def linear_of_rows_on_gpu(
    x: torch.Tensor,  # [num_rows, size]
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    is_normed: bool = False,
) -> torch.Tensor | None:
    """Run the linear with the kernel that its shapes call for; return None where the library is at least as fast."""
    num_rows, size = x.shape
    if weight.shape[0] <= NARROW_COLUMNS and not activation:
        return narrow_linear_on_gpu(x.contiguous(), weight, bias)
    config = linear_config(
        num_rows,
        weight.shape[0] // (2 if activation else 1),
        size,
        is_gated=bool(activation),
        itemsize=x.element_size() if x.dtype == weight.dtype else 0,
        gpu=gpu_limits(x.get_device()),
        is_normed=is_normed,
    )
    return None if config is None else linear_on_gpu(x.contiguous(), weight, bias, activation, config)


def linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: Config,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, or with an activation `act(gate) * up` of its halves: `[num_rows, num_columns]`."""
    if isinstance(config, SlicedConfig):
        return sliced_linear_on_gpu(x, weight, bias, activation, config)
    if isinstance(config, StreamedConfig):
        return streamed_linear_on_gpu(x, weight, bias, activation, config)
    num_rows, size = x.shape
    num_columns = weight.shape[0] // (2 if activation else 1)
    out = x.new_empty((num_rows, num_columns))
    if config.block_m == 0:
        _matvec.launch(
            (triton.cdiv(num_columns, config.block_n), 1, 1),
            (x, weight, bias, out, num_columns, size),
            {"ROWS": num_rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "ACTIVATION": activation},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    else:
        _matmul.launch(
            (triton.cdiv(num_columns, config.block_n), triton.cdiv(num_rows, config.block_m), 1),
            (x, weight, bias, out, num_columns, size, num_rows),
            {
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "ACTIVATION": activation,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


@own_kernel
@triton.jit
def matvec_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [ROWS, size]
    weight,  # [num_columns, size], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    out,  # [ROWS, num_columns], written
    num_columns,
    size,
    ROWS: tl.constexpr,  # a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks,). Products and sums in float32; the tile of weights ahead is on its way meanwhile."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    weights = weight + column[:, None].to(tl.int64) * size + at[None, :]
    others = weights + num_columns.to(tl.int64) * size
    is_column = column < num_columns
    if OVERLAP:
        gdc_launch_dependents()
    inside = is_column[:, None] & (at < size)[None, :]
    next_weights = tl.load(weights, mask=inside, other=0.0)
    if ACTIVATION != "":
        next_others = tl.load(others, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    other_total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, size, BLOCK_K):
        w = next_weights.to(tl.float32)
        if ACTIVATION != "":
            u = next_others.to(tl.float32)
        ahead = start + BLOCK_K
        if ahead < size:
            inside = is_column[:, None] & (ahead + at < size)[None, :]
            next_weights = tl.load(weights + ahead, mask=inside, other=0.0)
            if ACTIVATION != "":
                next_others = tl.load(others + ahead, mask=inside, other=0.0)
        for r in tl.static_range(ROWS):
            values = tl.load(x + r * size + start + at, mask=start + at < size, other=0.0).to(tl.float32)
            total += tl.where(row[None, :] == r, tl.sum(w * values[None, :], 1)[:, None], 0.0)
            if ACTIVATION != "":
                other_total += tl.where(row[None, :] == r, tl.sum(u * values[None, :], 1)[:, None], 0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION != "":
            other_total += tl.load(bias + num_columns + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != "":
        total = gated(total, other_total, ACTIVATION)
    tl.store(
        out + row[None, :] * num_columns + column[:, None], total.to(out.dtype.element_ty), mask=is_column[:, None]
    )


@own_kernel
@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, size], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    out,  # [num_rows, num_columns], written
    num_columns,
    size,  # a multiple of BLOCK_K
    num_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles of the weight that are prefetched before the wait; 0: all of them
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, row blocks). Weights that are prefetched before the wait are in L2 when it is over."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    is_column = column < num_columns
    is_row = row < num_rows
    first = tl.minimum(column, num_columns - 1)[:, None].to(tl.int64) * size
    to_other = num_columns.to(tl.int64) * size
    if OVERLAP:
        gdc_launch_dependents()
        AT_ONCE: tl.constexpr = AHEAD * BLOCK_K if AHEAD else 1024  # numbers of a row
        line = tl.arange(0, AT_ONCE // 64) * 64  # 128 bytes
        for start in range(0, AT_ONCE if AHEAD else size, AT_ONCE):
            ahead = weight + first + tl.minimum(start + line, size - 1)[None, :]
            prefetch(ahead)
            if ACTIVATION != "":
                prefetch(ahead + to_other)
        gdc_wait()
    weights = weight + first + at[None, :]
    values = x + row[:, None].to(tl.int64) * size + at[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        w = tl.load(weights + start)
        v = tl.load(values + start, mask=is_row[:, None], other=0.0)
        total = tl.dot(v, tl.trans(w), total)
        if ACTIVATION != "":
            u = tl.load(weights + to_other + start)
            other_total = tl.dot(v, tl.trans(u), other_total)
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            other_total += tl.load(bias + num_columns + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        total = gated(total, other_total, ACTIVATION)
    tl.store(
        out + row[:, None].to(tl.int64) * num_columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


_matvec = OverlappedKernel(matvec_kernel)
_matmul = OverlappedKernel(matmul_kernel)
