"""The gated delta rule for the few tokens of each request that a decode step computes."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.state_layers.kernels.request import keep_state, load_request, load_state


@own_kernel
@triton.jit
def delta_step_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    mixed,  # [num_tokens, channels]: query, key and value, convolved
    decay,  # [num_tokens, num_v_heads, 1 or KEY_DIM] float32
    beta,  # [num_tokens, num_v_heads]
    out,  # [num_tokens, num_v_heads, VALUE_DIM]
    states,  # [num_blocks, num_v_heads, KEY_DIM, VALUE_DIM] float32
    places,  # [num_rows * NUM_PLACES, num_v_heads, KEY_DIM, VALUE_DIM] float32 or None
    query_start_loc,
    seq_lens,
    block_table,
    slot_mapping,
    idx_mapping,
    prefill_lens,
    num_v_heads,
    num_k_heads,
    scale,
    mixed_stride,
    decay_stride,
    beta_stride,
    out_stride,
    block_stride,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """Compute the tokens of one request for one head and a block of its values, with the state in registers."""
    request, head = tl.program_id(0), tl.program_id(1)
    key_at, value_at = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key_at < KEY_DIM, value_at < VALUE_DIM
    start, count, first, is_kept, decodes, is_in_place, row = load_request(
        request, query_start_loc, seq_lens, slot_mapping, idx_mapping, prefill_lens, NUM_PLACES > 0
    )
    at = (head * KEY_DIM + key_at)[:, None] * VALUE_DIM + value_at[None, :]
    size = num_v_heads.to(tl.int64) * KEY_DIM * VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    state = load_state(
        state, states, places, at, is_state, size, block_stride, block_table, request, row, first, is_kept, is_in_place,
        TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
    )  # fmt: skip
    k_head = head // (num_v_heads // num_k_heads)
    for token in range(count):
        at_row = start + token
        of_row = mixed + at_row * mixed_stride
        query = tl.load(of_row + k_head * KEY_DIM + key_at, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(of_row + (num_k_heads + k_head) * KEY_DIM + key_at, mask=is_key, other=0.0).to(tl.float32)
        of_value = of_row + 2 * num_k_heads * KEY_DIM + head * VALUE_DIM
        value = tl.load(of_value + value_at, mask=is_value, other=0.0).to(tl.float32)
        query = query * tl.rsqrt(tl.sum(query * query) + NORM_EPS) * scale
        key = key * tl.rsqrt(tl.sum(key * key) + NORM_EPS)
        if BY_CHANNEL:
            kept = tl.load(decay + at_row * decay_stride + head * KEY_DIM + key_at, mask=is_key, other=0.0)
            state = state * tl.exp(kept.to(tl.float32))[:, None]
        else:
            state = state * tl.exp(tl.load(decay + at_row * decay_stride + head).to(tl.float32))
        known = tl.sum(state * key[:, None], axis=0)
        rate = tl.load(beta + at_row * beta_stride + head).to(tl.float32)
        state += key[:, None] * ((value - known) * rate)[None, :]
        result = tl.sum(state * query[:, None], axis=0)
        tl.store(
            out + at_row * out_stride + head * VALUE_DIM + value_at, result.to(out.dtype.element_ty), mask=is_value
        )
        if is_kept:
            keep_state(
                state, states, places, at, is_state, size, block_stride, block_table, request, row, first + token,
                token == count - 1, decodes, TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
            )  # fmt: skip
