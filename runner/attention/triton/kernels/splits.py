"""The part of kernels that combines the splits of a row: softmaxes over different keys become one over all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def add_splits(  # type: ignore[no-untyped-def]  # compiled by Triton
    request,  # the row of the first split in `partial_out`
    heads,  # [COMBINE_ROWS], within such a row
    is_row,  # [COMBINE_ROWS]
    first,
    num_active,
    others,  # the row of the second split
    apart,  # rows from each split to the next, from there on
    partial_out,
    partial_lse,
    top,
    total,
    acc,
    NUM_Q_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
):
    """Continue the online softmax over the tile of splits that starts at `first`.

    Both loads are in flight together and bypass L1 (`.cg`), because other SMs wrote the data. Padded rows keep a `top`
    of 0, so that they hold no NaN.
    """
    value_at = tl.arange(0, VALUE_BLOCK)
    splits = first + tl.arange(0, SPLIT_TILE)
    is_active = is_row[:, None] & (splits < num_active)[None, :]
    rows = tl.where(splits == 0, request, others + (splits - 1) * apart)
    partial = rows[None, :] * NUM_Q_HEADS + heads[:, None]  # [COMBINE_ROWS, SPLIT_TILE]
    lse = tl.load(partial_lse + partial, mask=is_active, other=float("-inf"), cache_modifier=".cg")
    part = tl.load(
        partial_out + partial[:, :, None] * VALUE_DIM + value_at[None, None, :],
        mask=is_active[:, :, None] & (value_at < VALUE_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    new_top = tl.where(is_row, tl.maximum(top, tl.max(lse, axis=1)), 0.0)
    weights = tl.exp2(lse - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], axis=1)
    return new_top, total, acc
