"""The states of a request of a step: where they are, which each program finds in the step's buffers.

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


@own_kernel
@triton.jit
def load_state(  # type: ignore[no-untyped-def]  # compiled by Triton
    state,  # what a request without one begins with
    states,  # [num_blocks, size]
    places,  # [num_rows * NUM_PLACES, size], or None
    at,  # of each number of `state`, where it lies in a block or a place
    is_state,  # which of them there are
    size,
    block_stride,
    block_table,
    request,
    row,
    first,
    is_kept,
    is_in_place,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    """Return the state before a request's first token of the step."""
    if is_kept & (first > 0):
        if is_in_place:
            if NUM_PLACES > 0:
                place = row * NUM_PLACES + (first - 1) % NUM_PLACES
                state = tl.load(places + place * size + at, mask=is_state, other=0.0)
        else:
            block = block_of(block_table, request, first - 1, TABLE_STRIDE, BLOCK_SIZE, PAGES)
            state = tl.load(states + block * block_stride + at, mask=is_state, other=0.0)
    return state


@own_kernel
@triton.jit
def keep_state(  # type: ignore[no-untyped-def]  # compiled by Triton
    state,
    states,
    places,
    at,
    is_state,
    size,
    block_stride,
    block_table,
    request,
    row,
    position,
    is_last,  # of the request's tokens
    decodes,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    """Store the state after the token at `position` where `load_state` or another request will look for it."""
    if NUM_PLACES > 0:
        if decodes:
            tl.store(places + (row * NUM_PLACES + position % NUM_PLACES) * size + at, state, mask=is_state)
    if (is_last & (decodes == 0)) | ((position + 1) % (BLOCK_SIZE * PAGES) == 0):
        block = block_of(block_table, request, position, TABLE_STRIDE, BLOCK_SIZE, PAGES)
        tl.store(states + block * block_stride + at, state, mask=is_state)
