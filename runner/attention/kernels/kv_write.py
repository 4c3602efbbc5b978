"""Writing a step's keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from piecegraph.runner.attention.kernels.launch import Grid, KernelCall
from piecegraph.runner.kv_cache import KVCache

BLOCK_TOKENS = 32
"""Tokens a program writes, of one KV head."""


def kv_write_grid(num_kv_heads: int, num_rows: int) -> Grid:
    return num_kv_heads, -(-num_rows // BLOCK_TOKENS), 1


def kv_write_call(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
    *,
    kv_cache: KVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    first_row: int,
    num_tokens: int,
) -> KernelCall:
    """Writes `kv_cache` at the slots of rows `first_row:num_tokens`; a negative slot is skipped."""
    num_kv_heads, key_dim = key.shape[1:]
    value_dim = value.shape[2]
    assert key.stride(2) == value.stride(2) == kv_cache.key.stride(3) == kv_cache.value.stride(3) == 1
    arguments: dict[str, Any] = {
        "key": key,
        "value": value,
        "key_cache": kv_cache.key,
        "value_cache": kv_cache.value,
        "slot_mapping": slot_mapping,
        "first_row": first_row,
        "num_tokens": num_tokens,
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "KEY_BLOCK_STRIDE": kv_cache.key.stride(0),
        "KEY_TOKEN_STRIDE": kv_cache.key.stride(1),
        "KEY_HEAD_STRIDE": kv_cache.key.stride(2),
        "VALUE_BLOCK_STRIDE": kv_cache.value.stride(0),
        "VALUE_TOKEN_STRIDE": kv_cache.value.stride(1),
        "VALUE_HEAD_STRIDE": kv_cache.value.stride(2),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(key_dim),
        "VALUE_BLOCK": triton.next_power_of_2(value_dim),
        "BLOCK_SIZE": kv_cache.key.shape[1],
        "BLOCK_TOKENS": BLOCK_TOKENS,
    }
    return KernelCall(
        kernel=kv_write_kernel,
        grid=kv_write_grid(num_kv_heads, num_tokens - first_row),
        arguments=arguments,
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


@triton.jit(
    do_not_specialize=["first_row", "num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def kv_write_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    key,  # [num_tokens, num_kv_heads, KEY_DIM]
    value,  # [num_tokens, num_kv_heads, VALUE_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, KEY_DIM], written
    value_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM], written
    slot_mapping,  # [num_tokens] int64
    first_row,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_TOKEN_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid: (num_kv_heads, token blocks). KV heads of a token are next to each other, in and out."""
    head = tl.program_id(0)
    rows = first_row + tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slots = tl.load(slot_mapping + rows, mask=rows < num_tokens, other=-1)
    rows = rows.to(tl.int64)
    is_real = (slots >= 0)[:, None]
    blocks = slots // BLOCK_SIZE
    tokens = slots % BLOCK_SIZE
    at = tl.arange(0, KEY_BLOCK)[None, :]
    mask = is_real & (at < KEY_DIM)
    source = key + head * key_head_stride + rows[:, None] * key_token_stride + at
    to = key_cache + head * KEY_HEAD_STRIDE + (blocks * KEY_BLOCK_STRIDE + tokens * KEY_TOKEN_STRIDE)[:, None] + at
    tl.store(to, tl.load(source, mask=mask), mask=mask)
    at = tl.arange(0, VALUE_BLOCK)[None, :]
    mask = is_real & (at < VALUE_DIM)
    source = value + head * value_head_stride + rows[:, None] * value_token_stride + at
    to = (
        value_cache
        + head * VALUE_HEAD_STRIDE
        + (blocks * VALUE_BLOCK_STRIDE + tokens * VALUE_TOKEN_STRIDE)[:, None]
        + at
    )
    tl.store(to, tl.load(source, mask=mask), mask=mask)
