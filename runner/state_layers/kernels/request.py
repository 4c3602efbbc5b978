"""Where the states of a request of a step are, found by each program from the step's buffers.

A step's tokens are positions `first` to `first + count - 1`. The state before them is in the block of the position
before, or in a place of the request's last states (`recent_states`). Nothing here is known to the host, so a captured
graph finds the states of whatever requests its buffers name.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def load_request(  # type: ignore[no-untyped-def]  # compiled by Triton
    request,
    query_start_loc,
    seq_lens,
    slot_mapping,
    idx_mapping,
    prefill_lens,
    HAS_PLACES: tl.constexpr,
):
    """Return the first row, the number of tokens and the first position of a request; whether it keeps states, whether
    it decodes (its states have places), whether its first state is in a place, and its state row.

    A request of padding has no tokens. One whose tokens have no slot begins without a state and keeps none.
    """
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    first = tl.load(seq_lens + request) - count
    is_kept = (count > 0) & (tl.load(slot_mapping + start, mask=count > 0, other=-1) >= 0)
    decodes = is_kept & (count < 0)  # False
    is_in_place = decodes
    row = count * 0
    if HAS_PLACES:
        row = tl.load(idx_mapping + request)
        prefill_len = tl.load(prefill_lens + tl.maximum(row, 0))
        row = tl.maximum(row, 0)
        decodes = is_kept & (prefill_len > 0) & (first >= prefill_len)
        is_in_place = decodes & (first > prefill_len)
    return start.to(tl.int64), count, first, is_kept, decodes, is_in_place, row.to(tl.int64)


@own_kernel
@triton.jit
def block_of(block_table, request, position, TABLE_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the block of a group with states that holds the state after `position`; blocks are `PAGES` pages."""
    page = tl.load(block_table + request.to(tl.int64) * TABLE_STRIDE + position // (BLOCK_SIZE * PAGES) * PAGES)
    return (page // PAGES).to(tl.int64)
