"""The new token of a decode program: its query heads, and its key and value, which are not in the cache yet."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.triton.kernels.paged import LOG2E, as_cached, log2_scores, shifted
from piecegraph.runner.attention.triton.kernels.rotate import load_rotated, load_tables, load_unrotated, rotate


@own_kernel
@triton.jit
def load_new_token(  # type: ignore[no-untyped-def]  # compiled by Triton
    request,  # int64
    is_writer,  # of the program's KV head
    is_first,  # part of the request
    slot,  # where the new key and value go; negative: nowhere
    kv_head,
    q_head,  # [BLOCK_M]
    rows,  # [BLOCK_M], of the KV head's group
    query,
    key,
    value,
    cos,
    sin,
    q_norm_weight,
    k_norm_weight,
    norm_eps,
    norm_offset,
    cos_stride,
    sin_stride,
    sinks,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    key_shift,
    scale,  # of scores of cached keys
    softcap,
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
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    JOINT: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load the query heads and start the online softmax; arguments are those of `decode_kernel`.

    Returns query heads `[BLOCK_M, KEY_BLOCK]`, normed and rotated, and the state of an online softmax over the new key
    and the sink: top score `[BLOCK_M]` in units of log 2, sum of weights `[BLOCK_M]`, weighted values
    `[BLOCK_M, VALUE_BLOCK]`, float32, of values as they are cached. The state of a request's other parts is empty. The
    writer of the first part writes key and value to the cache.
    """
    is_row = rows < GROUP
    key_at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    is_key = key_at < KEY_DIM
    is_value = value_at < VALUE_DIM
    query_heads = query + request * query_token_stride + q_head * query_head_stride
    key_head = key + request * key_token_stride + kv_head * key_head_stride
    new_value = tl.load(
        value + request * value_token_stride + kv_head * value_head_stride + value_at, mask=is_value, other=0.0
    )
    new_value = as_cached(new_value, value_scale, kv_head, value_cache.dtype.element_ty)
    if JOINT:  # the new key is one more row of the tile, and is rotated together with the query heads
        is_key_row = rows == GROUP
        no_rows = tl.zeros([BLOCK_M, 1], tl.int32)
        heads = tl.where(is_key_row, key_head, query_heads)[:, None]
        is_head = (is_row | is_key_row)[:, None]
        if ROTARY_DIM > 0:
            norm_weight = None
            if q_norm_weight is not None:
                norm_weight = tl.where(is_key_row[:, None], k_norm_weight + no_rows, q_norm_weight + no_rows)
            c, s = load_tables(
                cos + request * cos_stride + no_rows, sin + request * sin_stride + no_rows, is_head, KEY_BLOCK,
                ROTARY_DIM,
            )  # fmt: skip
            x, other, factor, other_factor = load_unrotated(
                heads, is_head, norm_weight, norm_offset, KEY_DIM, KEY_BLOCK, ROTARY_DIM, HAS_NORM
            )
            q = rotate(x, other, factor, other_factor, c, s, norm_eps, KEY_DIM, HAS_NORM).to(query.dtype.element_ty)
        else:
            q = tl.load(heads + key_at[None, :], mask=is_head & is_key[None, :], other=0.0)
        products = tl.dot(q, tl.trans(q), input_precision=PRECISION)
        new_score = tl.sum(tl.where((tl.arange(0, BLOCK_M) == GROUP)[None, :], products, 0.0), axis=1)
    else:
        if ROTARY_DIM > 0:
            token_cos = cos + request * cos_stride
            token_sin = sin + request * sin_stride
            q = load_rotated(
                query_heads[:, None], is_row[:, None], token_cos, token_sin, q_norm_weight, norm_eps, norm_offset,
                KEY_DIM, KEY_BLOCK, ROTARY_DIM, HAS_NORM,
            ).to(query.dtype.element_ty)  # fmt: skip
            one_row = tl.zeros([1, 1], tl.int32)
            new_key = load_rotated(
                key_head + one_row, one_row == 0, token_cos, token_sin, k_norm_weight, norm_eps, norm_offset,
                KEY_DIM, KEY_BLOCK, ROTARY_DIM, HAS_NORM,
            )  # fmt: skip
            # Rounded as it will be read from the cache, so that now and later it is the same key.
            new_key = shifted(tl.reshape(new_key, [KEY_BLOCK]), key_shift, kv_head, key_at, KEY_DIM)
            new_key = as_cached(new_key, key_scale, kv_head, key_cache.dtype.element_ty)
        else:
            q = tl.load(query_heads[:, None] + key_at[None, :], mask=is_row[:, None] & is_key[None, :], other=0.0)
            new_key = tl.load(key_head + key_at, mask=is_key, other=0.0)
            new_key = shifted(new_key, key_shift, kv_head, key_at, KEY_DIM)
            new_key = as_cached(new_key, key_scale, kv_head, key_cache.dtype.element_ty)
        new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1)
    new_score = log2_scores(new_score, scale, softcap, HAS_SOFTCAP)
    top = tl.where(is_first, new_score, float("-inf"))
    total = tl.where(is_first, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32) + tl.where(is_first, new_value.to(tl.float32), 0.0)[None, :]
    if sinks is not None:  # a key whose value is zero
        if is_first:
            sink = tl.load(sinks + q_head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(new_score, sink)
            weight = tl.exp2(new_score - top)
            total = weight + tl.exp2(sink - top)
            acc = acc * weight[:, None]
    if is_first & is_writer & (slot >= 0):
        block = slot // BLOCK_SIZE
        token = slot % BLOCK_SIZE
        to = key_cache + block * KEY_BLOCK_STRIDE + token * KEY_TOKEN_STRIDE + kv_head * KEY_HEAD_STRIDE
        if JOINT:
            tl.store(to + key_at[None, :] + no_rows, q, mask=is_key_row[:, None] & is_key[None, :])
        else:
            tl.store(to + key_at, new_key, mask=is_key)
        tl.store(
            value_cache
            + block * VALUE_BLOCK_STRIDE
            + token * VALUE_TOKEN_STRIDE
            + kv_head * VALUE_HEAD_STRIDE
            + value_at,
            new_value,
            mask=is_value,
        )
    return q, top, total, acc
