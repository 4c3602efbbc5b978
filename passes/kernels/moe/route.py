"""The routing kernel: pairs of token and expert, sorted by expert into blocks of rows. The grid knows no counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.moe.config import num_blocks_bound
from piecegraph.passes.kernels.moe.route_many import route_many

CHUNK = 1024
"""The pairs that a program reads at a time."""

FEW_PAIRS = 4096
"""The most pairs for which every program reads all of them; more are counted first (`route_many.py`)."""


class Routed(NamedTuple):
    """The sorted pairs. Block `b` has rows of expert `block_expert[b]`, which is -1 for unused blocks.

    A row is a pair, number `token * top_k + choice`; rows of a block that no pair fills are `num_pairs`. The content of
    `sorted_pairs` in unused blocks is arbitrary. A pair whose expert is none of those here is in no block.
    """

    sorted_pairs: torch.Tensor  # [num_blocks * block_m] int32
    block_expert: torch.Tensor  # [num_blocks] int32


def route(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> Routed:
    """Return the pairs sorted by expert.

    `topk_ids` is `[num_tokens, top_k]`, integers, contiguous, at least one; those outside of 0 to `num_experts - 1`
    name no expert. The sort is stable: equal ids give equal blocks.
    """
    num_pairs = topk_ids.numel()
    num_blocks = num_blocks_bound(num_pairs=num_pairs, num_experts=num_experts, block_m=block_m)
    sorted_pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=topk_ids.device)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=topk_ids.device)
    if num_pairs > FEW_PAIRS:
        route_many(topk_ids, num_experts, block_m, sorted_pairs, block_expert)
        return Routed(sorted_pairs, block_expert)
    _route.launch(
        (num_experts, 1, 1),
        (topk_ids, sorted_pairs, block_expert, num_pairs, num_blocks),
        {
            "BINS": max(32, triton.next_power_of_2(num_experts)),
            "BLOCK_M": block_m,
            "CHUNK": max(128, min(CHUNK, triton.next_power_of_2(num_pairs))),
        },
        num_warps=4,
        num_stages=1,
    )
    return Routed(sorted_pairs, block_expert)


@own_kernel
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def route_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    topk_ids,  # [num_pairs] integers
    sorted_pairs,  # [num_blocks * BLOCK_M] int32, written
    block_expert,  # [num_blocks] int32, written
    num_pairs,
    num_blocks,
    BINS: tl.constexpr,  # experts, padded to a power of two
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Count and sort the pairs of one expert. Grid: (experts,). Every program counts all pairs, so that none waits for
    another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    at = tl.arange(0, CHUNK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros([BINS], tl.int32)
    nobodys = 0
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(topk_ids + start + at, mask=start + at < num_pairs, other=-1)
        is_nobodys = (ids < 0) | (ids >= tl.num_programs(0))
        counts += tl.histogram(tl.where(is_nobodys, 0, ids).to(tl.int32), BINS)
        nobodys += tl.sum(is_nobodys.to(tl.int32))
    counts -= tl.where(bins == 0, nobodys, 0)  # they were counted as expert 0's
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    own_count = tl.sum(tl.where(bins == expert, counts, 0))

    rows = sorted_pairs + first_block * BLOCK_M
    found = 0
    if own_count > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + at
            ids = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1)
            is_own = ids == expert
            rank = found + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(rows + rank, pair, mask=is_own)
            found += tl.sum(is_own.to(tl.int32))
    empty = own_count + tl.arange(0, BLOCK_M)
    tl.store(rows + empty, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=empty < own_blocks * BLOCK_M)
    for block in range(first_block, first_block + own_blocks):
        tl.store(block_expert + block, expert)
    if expert == tl.num_programs(0) - 1:
        for start in range(first_block + own_blocks, num_blocks, CHUNK):
            tl.store(block_expert + start + at, tl.zeros([CHUNK], tl.int32) - 1, mask=start + at < num_blocks)


_route = OverlappedKernel(route_kernel)
