"""Routed experts with quantised weights: a tile of stored values becomes floats in registers and is multiplied there.

Pairs of token and expert are sorted by expert into blocks of rows, as `route.py` has it. Only stored bytes of
chosen experts are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.elementwise.gated import clamped_swiglu, gated
from piecegraph.passes.kernels.moe.grouped import sum_over_choices
from piecegraph.passes.kernels.moe.route import route
from piecegraph.passes.kernels.moe.stored_experts import Gate, Stored
from piecegraph.passes.kernels.quantised.weight_tiles import Tiles, WeightLayout, streamed_product
from piecegraph.passes.kernels.quantised.weights_only import pick_tiles

MAX_BLOCK_ROWS = 64
"""The most rows of one expert that a program multiplies: sums of gate and up are in registers together."""


def layout_of(weights: Stored) -> WeightLayout:
    """Return the layout of the weights of one expert."""
    values, scale = weights.values[0], _scales(weights)[0]
    is_e4m3 = values.dtype is torch.float8_e4m3fn
    size = values.shape[1] * (2 if values.dtype is torch.uint8 else 1)
    return WeightLayout.of(values, scale, weights.block if is_e4m3 else (1, size // scale.shape[1]))


def _scales(weights: Stored) -> torch.Tensor:
    """Return the scales as `[num_experts, row blocks, groups]`, or `[num_experts, row blocks, groups, 2]`."""
    return weights.scale.unsqueeze(-1) if weights.scale.ndim == 2 else weights.scale


def pick_expert_tiles(
    num_pairs: int, num_experts: int, layouts: tuple[WeightLayout, ...], itemsize: int, shared_bytes: int
) -> list[Tiles]:
    """Return the tiles of both products, with as many rows; none if groups of one fit no tile.

    Half as many rows again as an expert has on average: most experts then fit into one block.
    """
    rows = min(-(-3 * num_pairs // (2 * min(num_pairs, num_experts))), MAX_BLOCK_ROWS)
    found = [pick_tiles(rows, layout, itemsize, shared_bytes) for layout in layouts]
    return [tiles for tiles in found if tiles is not None] if None not in found else []


def quantised_experts_on_gpu(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    gate: Gate,
    round_inner: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Run `ops.quantised.experts`; None if the groups of weights fit no tile.

    `x` has been rounded, if it is to be, and `round_inner` rounds the input of the second product. Either is floats
    again, in the dtype of `x`, where it is multiplied.
    """
    (num_tokens, top_k), num_experts = topk_ids.shape, down.values.shape[0]
    first, second = layout_of(gate_up), layout_of(down)
    num_pairs, hidden, size = num_tokens * top_k, second.num_columns, second.size
    if num_pairs == 0:
        return torch.empty_like(x)
    shared_bytes = limits_of(x.device).shared_bytes
    tiles = pick_expert_tiles(num_pairs, num_experts, (first, second), x.element_size(), shared_bytes)
    if not tiles:
        return None
    topk_ids = topk_ids.contiguous()
    routed = route(topk_ids, num_experts, tiles[0].block_m)
    num_blocks = routed.block_expert.shape[0]
    inner = x.new_empty((num_pairs, size))
    _gate_up.launch(
        (num_blocks, triton.cdiv(size, tiles[0].block_n), 1),
        (x.contiguous(), *routed, gate_up.values, _scales(gate_up), gate_up.bias, inner, num_pairs, size),
        {
            **_constants(gate_up, first, tiles[0]),
            "TOP_K": top_k,
            "ACTIVATION": gate.activation,
            "IS_INTERLEAVED": gate.is_interleaved,
            "ALPHA": gate.alpha,
            "LIMIT": gate.limit,
        },
        num_warps=tiles[0].num_warps,
        num_stages=tiles[0].num_stages,
    )
    near = round_inner(inner)
    results = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    _down.launch(
        (num_blocks, triton.cdiv(hidden, tiles[1].block_n), 1),
        (near, *routed, topk_weights.contiguous(), down.values, _scales(down), down.bias, results, num_pairs, hidden),
        _constants(down, second, tiles[1]),
        num_warps=tiles[1].num_warps,
        num_stages=tiles[1].num_stages,
    )
    return sum_over_choices(results, topk_ids, num_experts, x.dtype)


def _constants(weights: Stored, layout: WeightLayout, tiles: Tiles) -> dict[str, Any]:
    scale = _scales(weights)
    return {
        "ROW_BLOCKS": scale.shape[1],
        "NUM_GROUPS": scale.shape[2],
        "INPUT_SIZE": layout.size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "STAGES": tiles.num_stages,
        "PACKED": 2 if layout.is_packed else 1,
        "GROUP": layout.group,
        "GROUPS": layout.groups_in(tiles.block_k),
        "BLOCK_ROWS": layout.block_rows,
        "HAS_OFFSET": layout.has_offset,
    }


@own_kernel
@triton.jit
def expert_product(  # type: ignore[no-untyped-def]  # compiled by Triton
    inputs,  # [BLOCK_M] pointers to the first number of each row
    is_row,  # [BLOCK_M]
    weights,  # [num_experts, rows, INPUT_SIZE / PACKED]
    scale,  # [num_experts, ROW_BLOCKS, NUM_GROUPS], or with offsets [.., 2]
    bias,  # [num_experts, rows], or None
    expert,
    num_rows,
    row,  # [BLOCK_N] int64, rows of the expert's weights
    is_column,  # [BLOCK_N]
    ROW_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    INPUT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """Return rows times the rows `row` of an expert's weights, and their bias: `[BLOCK_N, BLOCK_M]` float32."""
    row_block = expert * ROW_BLOCKS + row // BLOCK_ROWS
    total = streamed_product(
        inputs,
        is_row,
        weights + (expert * num_rows + row) * (INPUT_SIZE // PACKED),
        scale + row_block * NUM_GROUPS * (2 if HAS_OFFSET else 1),
        is_column,
        INPUT_SIZE,
        INPUT_SIZE // PACKED,
        NUM_GROUPS,
        0,
        (INPUT_SIZE + BLOCK_K - 1) // BLOCK_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        PACKED,
        GROUP,
        GROUPS,
        HAS_OFFSET,
    )
    if bias is not None:
        total += tl.load(bias + expert * num_rows + row, mask=is_column, other=0.0).to(tl.float32)[:, None]
    return total


@own_kernel
@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_tokens, INPUT_SIZE]
    sorted_pairs,  # see Routed
    block_expert,  # see Routed
    gate_up,  # [num_experts, 2 * size, INPUT_SIZE / PACKED]
    scale,
    bias,
    inner,  # [num_pairs, size], written
    num_pairs,
    size,
    ROW_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    INPUT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of rows, blocks of size). Rows of experts that are not here are not written."""
    block = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    is_column = column < size
    rows = x + pair // TOP_K * INPUT_SIZE
    gate_row = column * 2 if IS_INTERLEAVED else column
    up_row = gate_row + (1 if IS_INTERLEAVED else size)
    gate = expert_product(
        rows, is_pair, gate_up, scale, bias, expert, 2 * size, gate_row, is_column, ROW_BLOCKS, NUM_GROUPS, INPUT_SIZE,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PACKED, GROUP, GROUPS, BLOCK_ROWS, HAS_OFFSET,
    )  # fmt: skip
    up = expert_product(
        rows, is_pair, gate_up, scale, bias, expert, 2 * size, up_row, is_column, ROW_BLOCKS, NUM_GROUPS, INPUT_SIZE,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PACKED, GROUP, GROUPS, BLOCK_ROWS, HAS_OFFSET,
    )  # fmt: skip
    if ACTIVATION == "clamped_swiglu":
        result = clamped_swiglu(gate, up, ALPHA, LIMIT)
    else:
        result = gated(gate, up, ACTIVATION)
    tl.store(
        inner + pair[None, :] * size + column[:, None],
        result.to(inner.dtype.element_ty),
        mask=is_pair[None, :] & is_column[:, None],
    )


@own_kernel
@triton.jit(do_not_specialize=["num_pairs"])
def experts_down_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    inner,  # [num_pairs, INPUT_SIZE]
    sorted_pairs,  # see Routed
    block_expert,  # see Routed
    topk_weights,  # [num_pairs] floats
    down,  # [num_experts, hidden, INPUT_SIZE / PACKED]
    scale,
    bias,
    results,  # [num_pairs, hidden] float32, written
    num_pairs,
    hidden,
    ROW_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    INPUT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of rows, blocks of hidden). Rows of experts that are not here are not written."""
    block = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    is_column = column < hidden
    total = expert_product(
        inner + pair * INPUT_SIZE, is_pair, down, scale, bias, expert, hidden, column, is_column, ROW_BLOCKS,
        NUM_GROUPS, INPUT_SIZE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PACKED, GROUP, GROUPS, BLOCK_ROWS, HAS_OFFSET,
    )  # fmt: skip
    total *= tl.load(topk_weights + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    tl.store(results + pair[None, :] * hidden + column[:, None], total, mask=is_pair[None, :] & is_column[:, None])


_gate_up = OverlappedKernel(experts_gate_up_kernel)
_down = OverlappedKernel(experts_down_kernel)
