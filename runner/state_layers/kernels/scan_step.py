"""The scan of state-space layers for the few tokens of each request that a decode step computes."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.state_layers.kernels.request import keep_state, load_request, load_state


@own_kernel
@triton.jit
def scan_step_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    mixed,  # [num_tokens, channels]: x, B and C, convolved
    dt,  # [num_tokens, num_heads]
    A,  # [num_heads] or [num_heads, STATE_SIZE]
    D,  # [num_heads] or [num_heads, HEAD_DIM]
    out,  # [num_tokens, num_heads, HEAD_DIM]
    states,  # [num_blocks, num_heads, HEAD_DIM, STATE_SIZE] float32
    places,  # [num_rows * NUM_PLACES, num_heads, HEAD_DIM, STATE_SIZE] float32 or None
    query_start_loc,
    seq_lens,
    block_table,
    slot_mapping,
    idx_mapping,
    prefill_lens,
    num_heads,
    num_groups,
    mixed_stride,
    dt_stride,
    out_stride,
    block_stride,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    A_BY_STATE: tl.constexpr,
    D_BY_CHANNEL: tl.constexpr,
):
    """Compute the tokens of one request for a block of channels, the numbers of all heads, with states in registers."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    number = tl.arange(0, BLOCK_N)
    channels = num_heads * HEAD_DIM
    is_channel, is_number = channel < channels, number < STATE_SIZE
    head = tl.minimum(channel // HEAD_DIM, num_heads - 1)
    group = head // (num_heads // num_groups)
    start, count, first, is_kept, decodes, is_in_place, row = load_request(
        request, query_start_loc, seq_lens, slot_mapping, idx_mapping, prefill_lens, NUM_PLACES > 0
    )
    at = channel[:, None] * STATE_SIZE + number[None, :]
    size = channels.to(tl.int64) * STATE_SIZE
    is_state = is_channel[:, None] & is_number[None, :]
    state = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    state = load_state(
        state, states, places, at, is_state, size, block_stride, block_table, request, row, first, is_kept, is_in_place,
        TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
    )  # fmt: skip
    if A_BY_STATE:
        rate = tl.load(A + head[:, None] * STATE_SIZE + number[None, :], mask=is_state, other=0.0).to(tl.float32)
    else:
        rate = tl.load(A + head, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    skip = tl.load(D + (channel if D_BY_CHANNEL else head), mask=is_channel, other=0.0).to(tl.float32)
    of_group = channels + group[:, None] * STATE_SIZE + number[None, :]
    for token in range(count):
        at_row = start + token
        of_row = mixed + at_row * mixed_stride
        x = tl.load(of_row + channel, mask=is_channel, other=0.0).to(tl.float32)
        B = tl.load(of_row + of_group, mask=is_state, other=0.0).to(tl.float32)
        C = tl.load(of_row + of_group + num_groups * STATE_SIZE, mask=is_state, other=0.0).to(tl.float32)
        step = tl.load(dt + at_row * dt_stride + head, mask=is_channel, other=0.0).to(tl.float32)
        state = state * tl.exp(step[:, None] * rate) + (step * x)[:, None] * B
        result = tl.sum(state * C, axis=1) + x * skip
        tl.store(out + at_row * out_stride + channel, result.to(out.dtype.element_ty), mask=is_channel)
        if is_kept:
            keep_state(
                state, states, places, at, is_state, size, block_stride, block_table, request, row, first + token,
                token == count - 1, decodes, TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
            )  # fmt: skip
