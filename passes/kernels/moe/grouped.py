"""The experts of many tokens: rows sorted by expert are multiplied block by block, then summed token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.compensated import add_dot
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.moe.config import MoeConfig
from piecegraph.passes.kernels.moe.launch import launch_product
from piecegraph.passes.kernels.moe.route import route

SUM_BLOCK = 1024
"""The columns of a token that a program sums."""


def moe_grouped(
    x: torch.Tensor,  # [num_tokens, hidden], rows without gaps
    topk_weights: torch.Tensor,  # [num_tokens, top_k], contiguous
    topk_ids: torch.Tensor,  # [num_tokens, top_k], contiguous
    gate_up: torch.Tensor,  # [num_experts, 2 * size, hidden]
    down: torch.Tensor,  # [num_experts, hidden, size]
    activation: str,
    config: MoeConfig,
) -> torch.Tensor:
    """Run `ops.moe.experts` with four kernels. Results of a token's experts are summed in the order of its choice.

    Rows of `inner` and `results` for experts that are not here are neither written nor read.
    """
    (num_tokens, top_k), (num_experts, hidden, size) = topk_ids.shape, down.shape
    num_pairs = num_tokens * top_k
    routed = route(topk_ids, num_experts, config.block_m)
    num_blocks = routed.block_expert.shape[0]
    turns = triton.cdiv(num_blocks, config.group) * config.group
    inner = x.new_empty(num_pairs, size)
    sizes = {"HIDDEN": hidden, "SIZE": size}
    launch_product(
        _gate_up,
        (turns * triton.cdiv(size, config.gate_up.block_n), 1, 1),
        (x, *routed, gate_up, inner, num_pairs, num_blocks),
        gate_up,
        {"TOP_K": top_k, **sizes, "ACTIVATION": activation, "BLOCK_M": config.block_m, "GROUP": config.group},
        config.gate_up,
        x_stride=x.stride(0),
    )
    results = torch.empty(num_pairs, hidden, dtype=config.results_dtype(x.dtype), device=x.device)
    launch_product(
        _down,
        (turns * triton.cdiv(hidden, config.down.block_n), 1, 1),
        (inner, *routed, topk_weights, down, results, num_pairs, num_blocks),
        down,
        {**sizes, "BLOCK_M": config.block_m, "GROUP": config.group},
        config.down,
    )
    return sum_over_choices(results, topk_ids, num_experts, x.dtype)


def sum_over_choices(
    results: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return for each token the sum of its rows of `results`, `[num_tokens * top_k, hidden]`, in `dtype`.

    Sums are made in float32. `topk_ids`, `[num_tokens, top_k]` and contiguous, say which expert a row is of; rows of
    other experts than the `num_experts` here are not read and count as 0.
    """
    (num_pairs, hidden), top_k = results.shape, topk_ids.shape[1]
    out = results.new_empty((num_pairs // top_k, hidden), dtype=dtype)
    block = min(SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum.launch(
        (num_pairs // top_k, triton.cdiv(hidden, block), 1),
        (results, topk_ids, out),
        {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "HIDDEN": hidden, "BLOCK": block},
        num_warps=4,
        num_stages=1,
    )
    return out


@own_kernel
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_gate_up_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_tokens, HIDDEN], its rows X_STRIDE apart
    sorted_pairs,  # see Routed
    block_expert,  # see Routed
    gate_up,  # [num_experts, 2 * SIZE, HIDDEN]
    inner,  # [num_pairs, SIZE], written
    num_pairs,
    num_blocks,
    X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `inner`. The grid has a program for each block of rows, in whole groups, and each block of columns.

    `_place` gives their order.
    """
    block, column_block = _place((SIZE + BLOCK_N - 1) // BLOCK_N, GROUP)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(block_expert + block, mask=block < num_blocks, other=-1).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    is_column = column < SIZE
    rows = x + (pair // TOP_K)[:, None] * X_STRIDE
    gates = gate_up + expert * EXPERT_STRIDE + column[None, :] * ROW_STRIDE
    ups = gates + SIZE * ROW_STRIDE
    gate_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_lost = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_lost = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        k = start + at
        is_inside = (k < HIDDEN)[:, None] & is_column[None, :]
        values = tl.load(rows + k[None, :], mask=is_pair[:, None] & (k < HIDDEN)[None, :], other=0.0)
        gate = tl.load(gates + k[:, None] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        up = tl.load(ups + k[:, None] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        gate_total, gate_lost = add_dot(gate_total, gate_lost, values, gate)
        up_total, up_lost = add_dot(up_total, up_lost, values, up)
    result = gated(gate_total, up_total, ACTIVATION).to(inner.dtype.element_ty)
    tl.store(inner + pair[:, None] * SIZE + column[None, :], result, mask=is_pair[:, None] & is_column[None, :])


@own_kernel
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_down_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    inner,  # [num_pairs, SIZE]
    sorted_pairs,  # see Routed
    block_expert,  # see Routed
    topk_weights,  # [num_pairs] floats
    down,  # [num_experts, HIDDEN, SIZE]
    results,  # [num_pairs, HIDDEN], written
    num_pairs,
    num_blocks,
    EXPERT_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `results`. The grid has a program for each block of rows, in whole groups, and each block of columns.

    `_place` gives their order.
    """
    block, column_block = _place((HIDDEN + BLOCK_N - 1) // BLOCK_N, GROUP)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(block_expert + block, mask=block < num_blocks, other=-1).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    is_column = column < HIDDEN
    rows = inner + pair[:, None] * SIZE
    weights = down + expert * EXPERT_STRIDE + column[None, :] * ROW_STRIDE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    lost = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        k = start + at
        is_inside = (k < SIZE)[:, None] & is_column[None, :]
        values = tl.load(rows + k[None, :], mask=is_pair[:, None] & (k < SIZE)[None, :], other=0.0)
        tile = tl.load(weights + k[:, None] * COLUMN_STRIDE, mask=is_inside, other=0.0)
        total, lost = add_dot(total, lost, values, tile)
    total *= tl.load(topk_weights + pair, mask=is_pair, other=0.0).to(tl.float32)[:, None]
    tl.store(results + pair[:, None] * HIDDEN + column[None, :], total, mask=is_pair[:, None] & is_column[None, :])


@own_kernel
@triton.jit
def _place(num_column_blocks: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the program's block of rows and its block of columns.

    The blocks of rows of a group take turns at each block of columns, so they share an expert's weights in L2; the
    groups follow one another, so all columns of a group share its rows there.
    """
    program = tl.program_id(0)
    block = program // (num_column_blocks * GROUP) * GROUP + program % GROUP
    return block, program % (num_column_blocks * GROUP) // GROUP


@own_kernel
@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    results,  # [num_tokens, TOP_K, HIDDEN]
    topk_ids,  # [num_tokens, TOP_K] integers
    out,  # [num_tokens, HIDDEN], written
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (tokens, blocks of HIDDEN)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(topk_ids + pair)
        is_read = column < tl.where((expert >= 0) & (expert < NUM_EXPERTS), HIDDEN, 0)
        total += tl.load(results + pair * HIDDEN + column, mask=is_read, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)


_gate_up = OverlappedKernel(grouped_gate_up_kernel)
_down = OverlappedKernel(grouped_down_kernel)
_sum = OverlappedKernel(sum_kernel)
