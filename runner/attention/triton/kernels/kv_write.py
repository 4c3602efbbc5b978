"""The kernel that writes a step's keys and values into the paged cache.

Query and key are normed and rotated first if they come as they were projected: queries in place, keys on their way to
the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.kernels.launch import Grid, KernelCall
from piecegraph.runner.attention.triton.kernels.paged import (
    as_cached,
    cache_strides,
    scale_tensors,
    shift_tensor,
    shifted,
)
from piecegraph.runner.attention.triton.kernels.rotate import (
    load_and_rotate,
    load_tables,
    rotary_constants,
    rotary_tensors,
)
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape

BLOCK_TOKENS = 32
"""Tokens a program writes, of one KV head."""

ROTATED_NUMBERS = 2048
"""Numbers of a tile that is rotated: a program holds several copies of the tile, as float32."""


MAX_HEADS = 4
"""Heads that a program rotates one after the other, where there are tokens enough: their tables are loaded once."""

MIN_PROGRAMS = 2048
"""The fewest programs of a launch in which a program takes several heads."""


class KVWriteLayout(NamedTuple):
    """The grid of a K/V write."""

    grid: Grid
    heads: int  # heads a program


def kv_write_layout(shape: HeadShape, num_rows: int, rotary: Rotary | None) -> KVWriteLayout:
    """Return the layout for `num_rows` rows; all layouts of one `shape` and `rotary` share a compiled kernel."""
    if rotary is None:
        return KVWriteLayout((shape.num_kv_heads, -(-num_rows // BLOCK_TOKENS), 1), 1)
    num_heads, blocks = shape.num_kv_heads + shape.num_q_heads, -(-num_rows // _block_tokens(shape.key_dim, rotary))
    heads = max(1, min(MAX_HEADS, num_heads * blocks // MIN_PROGRAMS))
    return KVWriteLayout((-(-num_heads // heads), blocks, 1), heads)


def _block_tokens(key_dim: int, rotary: Rotary | None) -> int:
    if rotary is None:
        return BLOCK_TOKENS
    padded_dim: int = triton.next_power_of_2(key_dim)
    return min(BLOCK_TOKENS, max(1, ROTATED_NUMBERS // padded_dim))


def kv_write_call(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
    *,
    kv_cache: KVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    first_row: int,
    num_tokens: int,
    query: torch.Tensor,  # [num_tokens, num_q_heads, key_dim], rotated in place
    first_query: int = 0,
    rotary: Rotary | None = None,
) -> KernelCall:
    """Return the launch that writes `kv_cache` at the slots of rows `first_row:num_tokens`.

    A row with a negative slot is skipped. With `rotary`, the queries of those rows from `first_query` on are rotated,
    otherwise `query` is not touched.
    """
    key_dim, value_dim = key.shape[2], value.shape[2]
    assert key.stride(2) == value.stride(2) == kv_cache.key.stride(3) == kv_cache.value.stride(3) == 1
    shape, tensors = HeadShape.of(query, value), rotary_tensors(rotary, key_dim)
    layout = kv_write_layout(shape, num_tokens - first_row, rotary)
    assert query.stride(2) == 1
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        **tensors,
        "key_cache": kv_cache.key,
        "value_cache": kv_cache.value,
        **scale_tensors(kv_cache),
        **shift_tensor(kv_cache),
        "slot_mapping": slot_mapping,
        "first_row": first_row,
        "first_query": first_query,
        "num_tokens": num_tokens,
        "heads": layout.heads,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        **cache_strides(kv_cache),
        "NUM_KV_HEADS": shape.num_kv_heads,
        "NUM_HEADS": shape.num_kv_heads + (shape.num_q_heads if rotary is not None else 0),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(key_dim),
        "VALUE_BLOCK": triton.next_power_of_2(value_dim),
        "BLOCK_SIZE": kv_cache.key.shape[1],
        "BLOCK_TOKENS": _block_tokens(key_dim, rotary),
        **rotary_constants(rotary),
    }
    return KernelCall(
        kernel=kv_write_kernel,
        grid=layout.grid,
        arguments=arguments,
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


@own_kernel
@triton.jit(
    do_not_specialize=["first_row", "first_query", "num_tokens", "heads"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def kv_write_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    query,  # [num_tokens, num_q_heads, KEY_DIM], written if ROTARY_DIM > 0
    key,  # [num_tokens, NUM_KV_HEADS, KEY_DIM]
    value,  # [num_tokens, NUM_KV_HEADS, VALUE_DIM]
    cos,  # [num_tokens, ROTARY_DIM] or None
    sin,  # the same
    q_norm_weight,  # [KEY_DIM] or None
    k_norm_weight,  # [KEY_DIM] or None
    norm_eps,
    norm_offset,
    cos_stride,
    sin_stride,
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM], written
    value_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM], written
    key_scale,  # [NUM_KV_HEADS] float32, by which keys are divided, or None
    value_scale,  # the same of values
    key_shift,  # [NUM_KV_HEADS, KEY_DIM] float32, subtracted from keys before they are divided, or None
    slot_mapping,  # [num_tokens] int64
    first_row,
    first_query,
    num_tokens,
    heads,  # of a program, one after the other
    query_token_stride,
    query_head_stride,
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
    NUM_KV_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # of keys, and of queries if those are rotated
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # numbers of a head that are rotated; 0: query and key come as they are used
    HAS_NORM: tl.constexpr,  # of query and key, before they are rotated
):
    """Write a block of tokens of a block of heads.

    Grid: (blocks of heads, token blocks); KV heads of a token are adjacent, in the input and in the cache. If anything
    is rotated, query heads follow the KV heads.
    """
    rows = first_row + tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_row = rows < num_tokens
    slots = tl.load(slot_mapping + rows, mask=is_row, other=-1)
    rows = rows.to(tl.int64)
    is_real = (slots >= 0)[:, None]
    is_query = (is_row & (rows >= first_query))[:, None]
    key_to = (slots // BLOCK_SIZE * KEY_BLOCK_STRIDE + slots % BLOCK_SIZE * KEY_TOKEN_STRIDE)[:, None]
    value_to = (slots // BLOCK_SIZE * VALUE_BLOCK_STRIDE + slots % BLOCK_SIZE * VALUE_TOKEN_STRIDE)[:, None]
    key_at = tl.arange(0, KEY_BLOCK)[None, :]
    value_at = tl.arange(0, VALUE_BLOCK)[None, :]
    no_rows = tl.zeros([BLOCK_TOKENS, 1], tl.int32)
    if ROTARY_DIM > 0:
        tables = rows[:, None]
        c, s = load_tables(cos + tables * cos_stride, sin + tables * sin_stride, is_row[:, None], KEY_BLOCK, ROTARY_DIM)
    key_weights = None
    if k_norm_weight is not None:
        key_weights = k_norm_weight + no_rows
    query_weights = None
    if q_norm_weight is not None:
        query_weights = q_norm_weight + no_rows
    first_head = tl.program_id(0) * heads
    for head in range(first_head, tl.minimum(first_head + heads, NUM_HEADS)):
        if head < NUM_KV_HEADS:
            from_heads = key + head * key_head_stride + rows[:, None] * key_token_stride
            mask = is_real & (key_at < KEY_DIM)
            if ROTARY_DIM > 0:
                new_keys = load_and_rotate(
                    from_heads, is_real, c, s, key_weights, norm_eps, norm_offset,
                    KEY_DIM, KEY_BLOCK, ROTARY_DIM, HAS_NORM,
                )  # fmt: skip
            else:
                new_keys = tl.load(from_heads + key_at, mask=mask)
            new_keys = shifted(new_keys, key_shift, head, key_at, KEY_DIM)
            tl.store(
                key_cache + head * KEY_HEAD_STRIDE + key_to + key_at,
                as_cached(new_keys, key_scale, head, key_cache.dtype.element_ty),
                mask=mask,
            )
            source = value + head * value_head_stride + rows[:, None] * value_token_stride + value_at
            mask = is_real & (value_at < VALUE_DIM)
            to = value_cache + head * VALUE_HEAD_STRIDE + value_to + value_at
            new_values = tl.load(source, mask=mask)
            tl.store(to, as_cached(new_values, value_scale, head, value_cache.dtype.element_ty), mask=mask)
        elif ROTARY_DIM > 0:
            to_heads = query + (head - NUM_KV_HEADS) * query_head_stride + rows[:, None] * query_token_stride
            rotated = load_and_rotate(
                to_heads, is_query, c, s, query_weights, norm_eps, norm_offset,
                KEY_DIM, KEY_BLOCK, ROTARY_DIM, HAS_NORM,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have loaded what others overwrite
            tl.store(to_heads + key_at, rotated.to(query.dtype.element_ty), mask=is_query & (key_at < KEY_DIM))
