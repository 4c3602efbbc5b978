"""How kernels find keys and values in a paged cache, and what they make of a score.

A tile is `BLOCK_N` consecutive positions of one request, starting at a multiple of `BLOCK_N`. If the
tile lies within one block (`ONE_PAGE`) its place is one number; otherwise each position looks up its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.own_kernel import own_kernel

LOG2E = tl.constexpr(1.4426950408889634)


@own_kernel
@triton.jit
def load_pages(blocks, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Block numbers of the tile that starts at position `first`: int32, one, or `[BLOCK_N]`.

    `blocks`: the request's row of the block table. Entries at or after position `end` are not read.
    Nothing but the load, so that a loop may carry its result: Triton's pipeliner moves a carried load
    ahead of its use, but not one that something was computed from.
    """
    if ONE_PAGE:
        pages = tl.load(blocks + first // BLOCK_SIZE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK_N)
        pages = tl.load(blocks + positions // BLOCK_SIZE, mask=positions < end, other=0)
    return pages


@own_kernel
@triton.jit
def cache_rows(  # type: ignore[no-untyped-def]  # compiled by Triton
    pages,
    first,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Element offsets `[BLOCK_N]` int64 of a tile's positions in a cache with these strides."""
    offsets = tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        tokens = first % BLOCK_SIZE + offsets
    else:
        tokens = (first + offsets) % BLOCK_SIZE
    return pages.to(tl.int64) * BLOCK_STRIDE + tokens * TOKEN_STRIDE


@own_kernel
@triton.jit
def log2_scores(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Scaled and capped scores in units of log 2, so that `exp2` gives their weights."""
    if HAS_SOFTCAP:
        # softcap * tanh(x); this form of tanh has the right limits where exp2 overflows
        doubled = tl.exp2(scores * (2 * scale / softcap * LOG2E))
        return (softcap * LOG2E) * (1 - 2 / (1 + doubled))
    return scores * (scale * LOG2E)
