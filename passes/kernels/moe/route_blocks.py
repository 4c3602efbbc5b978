"""The counts and blocks of experts, which the kernels for few and for many pairs of token and expert share."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def count_experts(ids, num_experts, bins, BINS: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return how many of `ids` name each expert, `[BINS]` int32; ids outside of 0 to `num_experts - 1` name none."""
    is_nobodys = (ids < 0) | (ids >= num_experts)
    counts = tl.histogram(tl.where(is_nobodys, 0, ids).to(tl.int32), BINS)
    return counts - tl.where(bins == 0, tl.sum(is_nobodys.to(tl.int32)), 0)  # they were counted as expert 0's


@own_kernel
@triton.jit
def begin_blocks(  # type: ignore[no-untyped-def]  # compiled by Triton
    counts, bins, expert, sorted_pairs, block_expert, num_pairs, num_blocks, BINS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the first row and the pairs of `expert`, one a program, whose blocks follow those of the experts before.

    Its blocks are named in `block_expert`, and their rows that no pair fills are marked. The last program names the
    blocks that nobody uses.
    """
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    own_count = tl.sum(tl.where(bins == expert, counts, 0))
    empty = own_count + tl.arange(0, BLOCK_M)
    rows = sorted_pairs + first_block * BLOCK_M
    tl.store(rows + empty, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=empty < own_blocks * BLOCK_M)
    for block in range(first_block, first_block + own_blocks):
        tl.store(block_expert + block, expert)
    if expert == tl.num_programs(0) - 1:
        for start in range(first_block + own_blocks, num_blocks, BINS):
            tl.store(block_expert + start + bins, tl.zeros([BINS], tl.int32) - 1, mask=start + bins < num_blocks)
    return first_block * BLOCK_M, own_count
