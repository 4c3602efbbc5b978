"""The experts of few tokens: each pair of token and expert is a product with a vector, as fast as weights are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.moe.config import MoeConfig
from piecegraph.passes.kernels.moe.launch import launch_product


def moe_matvec(
    x: torch.Tensor,  # [num_tokens, hidden], rows without gaps
    topk_weights: torch.Tensor,  # [num_tokens, top_k], contiguous
    topk_ids: torch.Tensor,  # [num_tokens, top_k], contiguous
    gate_up: torch.Tensor,  # [num_experts, 2 * size, hidden]
    down: torch.Tensor,  # [num_experts, hidden, size]
    activation: str,
    config: MoeConfig,
) -> torch.Tensor:
    """Run `ops.moe.experts` with two kernels. The second sums over a token's experts in the order of its choice.

    Rows of `inner` for experts that are not here are neither written nor read.
    """
    (num_tokens, top_k), (num_experts, hidden, size) = topk_ids.shape, down.shape
    inner = x.new_empty(num_tokens * top_k, size)
    sizes = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "HIDDEN": hidden, "SIZE": size}
    launch_product(
        _gate_up,
        (num_tokens * top_k, triton.cdiv(size, config.gate_up.block_n), 1),
        (x, topk_ids, gate_up, inner),
        gate_up,
        {**sizes, "ACTIVATION": activation},
        config.gate_up,
        x_stride=x.stride(0),
    )
    out = x.new_empty(num_tokens, hidden)
    launch_product(
        _down,
        (triton.cdiv(hidden, config.down.block_n), num_tokens, 1),
        (inner, topk_weights, topk_ids, down, out),
        down,
        sizes,
        config.down,
    )
    return out


@own_kernel
@triton.jit
def matvec_gate_up_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_tokens, HIDDEN], its rows X_STRIDE apart
    topk_ids,  # [num_tokens, TOP_K] integers
    gate_up,  # [num_experts, 2 * SIZE, HIDDEN]
    inner,  # [num_tokens * TOP_K, SIZE], written
    X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (pairs, blocks of SIZE). Pairs that share an expert read its rows at about the same time, from L2."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    is_column = column < SIZE
    gates = gate_up + expert * EXPERT_STRIDE + column[:, None] * ROW_STRIDE
    ups = gates + SIZE * ROW_STRIDE
    row = x + (pair // TOP_K).to(tl.int64) * X_STRIDE
    gate_total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        k = start + at
        is_inside = is_column[:, None] & (k < HIDDEN)[None, :]
        values = tl.load(row + k, mask=k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate = tl.load(gates + k[None, :] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        up = tl.load(ups + k[None, :] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        gate_total += gate.to(tl.float32) * values
        up_total += up.to(tl.float32) * values
    result = gated(tl.sum(gate_total, 1), tl.sum(up_total, 1), ACTIVATION)
    tl.store(inner + pair.to(tl.int64) * SIZE + column, result.to(inner.dtype.element_ty), mask=is_column)


@own_kernel
@triton.jit
def matvec_down_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    inner,  # [num_tokens * TOP_K, SIZE]
    topk_weights,  # [num_tokens, TOP_K] floats
    topk_ids,  # [num_tokens, TOP_K] integers
    down,  # [num_experts, HIDDEN, SIZE]
    out,  # [num_tokens, HIDDEN], written
    EXPERT_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of HIDDEN, tokens). One loop over all of a token's experts keeps loads on their way throughout."""
    CHUNKS: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    is_column = column < HIDDEN
    rows = down + column[:, None].to(tl.int64) * ROW_STRIDE
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TOP_K * CHUNKS, num_stages=STAGES):
        pair = token * TOP_K + step // CHUNKS
        k = step % CHUNKS * BLOCK_K + at
        expert = tl.load(topk_ids + pair).to(tl.int64)
        is_here = (expert >= 0) & (expert < NUM_EXPERTS)
        weight = tl.where(is_here, tl.load(topk_weights + pair).to(tl.float32), 0.0)  # elsewhere it may be NaN
        is_inner = k < tl.where(is_here, SIZE, 0)
        values = tl.load(inner + pair.to(tl.int64) * SIZE + k, mask=is_inner, other=0.0).to(tl.float32) * weight
        is_inside = is_column[:, None] & is_inner[None, :]
        tile = tl.load(rows + expert * EXPERT_STRIDE + k[None, :] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        total += tile.to(tl.float32) * values[None, :]
    result = tl.sum(total, 1)
    tl.store(out + token.to(tl.int64) * HIDDEN + column, result.to(out.dtype.element_ty), mask=is_column)


_gate_up = OverlappedKernel(matvec_gate_up_kernel)
_down = OverlappedKernel(matvec_down_kernel)
