"""A residual add, the norm of the sum and a linear of one row over it, in one kernel.

Every program adds and norms the row by itself: that reads a few kilobytes from L2, and the weights arrive meanwhile. So
a decode step of one request has one launch less at each norm. With two rows the repeated work takes longer than the
launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_LINEAR_SIZE, gpu_limits
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.linear.linear_config import (
    SIZE_MULTIPLE,
    LinearConfig,
    linear_config,
    norm_linear_config,
)
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig


def norm_linear_layout(x: torch.Tensor, weight: torch.Tensor, activation: str) -> LinearConfig | None:
    """Return the layout if `x` is one row and our kernel takes it, else None.

    None also where the weight is streamed after a norm of its own (query, key and value of Llama-8B: 2.9 of 120.6 us a
    layer).
    """
    size = x.shape[-1]
    num_columns = weight.shape[0] // (2 if activation else 1)
    if x.numel() != size or size > MAX_NORM_LINEAR_SIZE or size % SIZE_MULTIPLE or num_columns % 16:
        return None
    if x.dtype != weight.dtype or x.element_size() != 2:
        return None
    config = norm_linear_config(size, 2 * weight.numel(), is_gated=bool(activation))
    if config is None or activation:
        return config
    gpu = gpu_limits(x.get_device())
    apart = linear_config(1, num_columns, size, is_gated=False, itemsize=2, gpu=gpu, is_normed=True)
    return None if isinstance(apart, StreamedConfig) else config


def add_norm_linear_on_gpu(
    x: torch.Tensor,  # [..., size], one row
    residual: torch.Tensor,  # the same
    norm_weight: torch.Tensor | None,  # [size], contiguous; there before the preceding kernel has ended
    eps: float,
    offset: float,
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: LinearConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.norm_linear.add_norm_linear` on a GPU."""
    size = x.shape[-1]
    num_columns = weight.shape[0] // (2 if activation else 1)
    total = x.new_empty(x.shape)
    out = x.new_empty((*x.shape[:-1], num_columns))
    _norm_matvec.launch(
        (triton.cdiv(num_columns, config.block_n), 1, 1),
        (
            x.contiguous(),
            residual.contiguous(),
            norm_weight,
            weight,
            bias,
            total,
            out,
            num_columns,
            eps,
            offset,
        ),
        {
            "SIZE": size,
            "COLUMNS": triton.next_power_of_2(size),
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "ACTIVATION": activation,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, total


@own_kernel
@triton.jit
def norm_matvec_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [SIZE]
    residual,  # [SIZE]
    norm_weight,  # [SIZE], or None
    weight,  # [num_columns, SIZE], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    total,  # [SIZE], written by the first program
    out,  # [num_columns], written
    num_columns,
    eps,
    offset,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # SIZE, padded to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks,). Products and sums in float32; the tile of weights ahead is on its way meanwhile."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    weights = weight + column[:, None].to(tl.int64) * SIZE + at[None, :]
    others = weights + num_columns.to(tl.int64) * SIZE
    is_column = column < num_columns
    if OVERLAP:
        gdc_launch_dependents()
    inside = is_column[:, None] & (at < SIZE)[None, :]
    next_weights = tl.load(weights, mask=inside, other=0.0)
    if ACTIVATION != "":
        next_others = tl.load(others, mask=inside, other=0.0)
    if norm_weight is not None:
        next_factor = tl.load(norm_weight + at, mask=at < SIZE, other=0.0)
    if OVERLAP:
        gdc_wait()

    # What the row is divided by. The sum is rounded before it is normed, as the one that is stored.
    whole = tl.arange(0, COLUMNS)
    summed = _sum_of(x, residual, whole, SIZE)
    if tl.program_id(0) == 0:
        tl.store(total + whole, summed, mask=whole < SIZE)
    wide = summed.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)

    products = tl.zeros([BLOCK_N], tl.float32)
    other_products = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        w = next_weights.to(tl.float32)
        if ACTIVATION != "":
            u = next_others.to(tl.float32)
        if norm_weight is not None:
            factor = next_factor.to(tl.float32) + offset
        ahead = start + BLOCK_K
        if ahead < SIZE:
            inside = is_column[:, None] & (ahead + at < SIZE)[None, :]
            next_weights = tl.load(weights + ahead, mask=inside, other=0.0)
            if ACTIVATION != "":
                next_others = tl.load(others + ahead, mask=inside, other=0.0)
            if norm_weight is not None:
                next_factor = tl.load(norm_weight + ahead + at, mask=ahead + at < SIZE, other=0.0)
        normed = _sum_of(x, residual, start + at, SIZE).to(tl.float32) * shrink
        if norm_weight is not None:
            normed = normed * factor
        values = normed.to(out.dtype.element_ty).to(tl.float32)[None, :]
        products += tl.sum(w * values, 1)
        if ACTIVATION != "":
            other_products += tl.sum(u * values, 1)
    if bias is not None:
        products += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            other_products += tl.load(bias + num_columns + column, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        products = gated(products, other_products, ACTIVATION)
    tl.store(out + column, products.to(out.dtype.element_ty), mask=is_column)


@own_kernel
@triton.jit
def _sum_of(x, residual, at, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the numbers `at` of a row plus the residual, rounded to their dtype."""
    one = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
    other = tl.load(residual + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return (one + other).to(x.dtype.element_ty)


_norm_matvec = OverlappedKernel(norm_matvec_kernel)
