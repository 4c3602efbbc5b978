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
from piecegraph.passes.kernels.moe.route_blocks import begin_blocks, count_experts
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
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(topk_ids + start + at, mask=start + at < num_pairs, other=-1)
        counts += count_experts(ids, tl.num_programs(0), bins, BINS)
    first_row, own_count = begin_blocks(
        counts, bins, expert, sorted_pairs, block_expert, num_pairs, num_blocks, BINS, BLOCK_M
    )
    rows = sorted_pairs + first_row
    found = 0
    if own_count > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + at
            ids = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1)
            is_own = ids == expert
            rank = found + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(rows + rank, pair, mask=is_own)
            found += tl.sum(is_own.to(tl.int32))


_route = OverlappedKernel(route_kernel)
