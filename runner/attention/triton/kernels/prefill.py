"""Attention of requests with any number of new tokens, over the paged cache that holds those too.

The loop is FlashAttention-2's. As in vLLM's unified Triton attention, a tile of rows is a few query tokens of
one request with all query heads of one KV head, and a program finds its request from `query_start_loc`,
so that the grid depends on the number of rows and requests alone and fits any batch at replay. Where that gives few
programs, as for a few requests that verify drafts, several programs share the keys of a tile (split-KV as in
Flash-Decoding), and the last to arrive combines their results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.kernels.launch import Grid, KernelCall
from piecegraph.runner.attention.triton.kernels.paged import (
    LOG2E,
    cache_rows,
    cache_strides,
    load_pages,
    log2_scores,
    scale_tensors,
)
from piecegraph.runner.attention.triton.kernels.splits import add_splits
from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import MAX_SPLITS, MIN_SPLIT_LEN, PrefillConfig

COMBINE_ROWS = tl.constexpr(4)
"""Rows of a tile whose splits are added up at a time."""


def prefill_grid(
    shape: HeadShape, num_rows: int, num_reqs: int, config: PrefillConfig, *, max_len: int = 0, num_sms: int = 0
) -> Grid:
    """Return a grid with enough programs for `num_reqs` requests of `num_rows` rows together, however shared.

    `max_len` bounds the length of a request; 0: no tile's keys are split.
    """
    num_blocks = num_rows // config.block_q(shape.group) + num_reqs
    num_splits = config.num_splits(shape.num_kv_heads * num_blocks, max_len=max_len, num_sms=num_sms)
    return shape.num_kv_heads, num_blocks, num_splits


def prefill_call(
    call: AttentionCall,
    kv_cache: KVCache,
    *,
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32, the new tokens included
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
    first_req: int,
    num_reqs: int,
    num_rows: int,  # of requests from `first_req` on, or more
    config: PrefillConfig,
    workspace: SplitWorkspace | None = None,
    max_len: int = 0,
    num_sms: int = 0,
) -> KernelCall:
    """Return the launch that writes the rows of `call.out` that belong to requests `first_req:num_reqs`.

    Their keys and values are in the cache already, and `call.query` is rotated; `call.key`, `call.value` and
    `call.rotary` are not read. Requests before `first_req` have one row each. `max_len` and `num_sms` decide how many
    programs share the keys of a tile, which takes a `workspace` (`prefill_grid`); its `arrivals` are left zero.
    """
    query = call.query
    shape = HeadShape.of(query, kv_cache.value[0])
    assert shape.group <= config.block_m, (shape, config)
    assert call.out.is_contiguous() and query.stride(2) == 1 and block_table.stride(1) == 1
    assert kv_cache.key.stride(3) == kv_cache.value.stride(3) == 1
    grid = prefill_grid(shape, num_rows, num_reqs - first_req, config, max_len=max_len, num_sms=num_sms)
    if grid[2] > 1:
        assert workspace is not None and grid[0] * grid[1] * grid[2] * config.block_m <= workspace.lse.shape[0], config
    shared = workspace if config.can_split else None
    arguments: dict[str, Any] = {
        "query": query,
        "out": call.out,
        "sinks": call.sinks,
        "key_cache": kv_cache.key,
        "value_cache": kv_cache.value,
        **scale_tensors(kv_cache),
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "partial_out": None if shared is None else shared.out,
        "partial_lse": None if shared is None else shared.lse,
        "arrivals": None if shared is None else shared.arrivals,
        "scale": float(call.scale),
        "softcap": float(call.softcap),
        "window": call.window,
        "block_table_stride": block_table.stride(0),
        "first_req": first_req,
        "num_reqs": num_reqs,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        **cache_strides(kv_cache),
        "NUM_Q_HEADS": shape.num_q_heads,
        "GROUP": shape.group,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_BLOCK": max(16, triton.next_power_of_2(shape.key_dim)),
        "VALUE_BLOCK": max(16, triton.next_power_of_2(shape.value_dim)),
        "BLOCK_SIZE": kv_cache.key.shape[1],
        "BLOCK_M": config.block_m,
        "BLOCK_Q": config.block_q(shape.group),
        "BLOCK_N": config.block_n,
        "HAS_WINDOW": call.window > 0,
        "HAS_SOFTCAP": call.softcap > 0.0,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
        "MIN_SPLIT_LEN": MIN_SPLIT_LEN,
        "SPLITS": 1 if shared is None else MAX_SPLITS,
    }
    return KernelCall(
        kernel=prefill_kernel,
        grid=grid,
        arguments=arguments,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True},
    )


@own_kernel
@triton.jit(
    do_not_specialize=["window", "block_table_stride", "first_req", "num_reqs"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "sinks"],
)
def prefill_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    query,  # [num_tokens, NUM_Q_HEADS, KEY_DIM]
    out,  # [num_tokens, NUM_Q_HEADS, VALUE_DIM], written
    sinks,  # [NUM_Q_HEADS] or None
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, KEY_DIM]
    value_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]
    key_scale,  # [num_kv_heads] float32, the factors of cached keys, or None
    value_scale,  # the same of values
    query_start_loc,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    block_table,  # [num_reqs, max_blocks] int32
    partial_out,  # [query blocks, splits, num_kv_heads, BLOCK_M, VALUE_DIM] float32, written; None: no splits
    partial_lse,  # the same without VALUE_DIM
    arrivals,  # [query blocks, num_kv_heads] int32, zero before and after
    scale,
    softcap,
    window,
    block_table_stride,
    first_req,
    num_reqs,
    query_token_stride,
    query_head_stride,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_TOKEN_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows a tile, at least BLOCK_Q * GROUP
    BLOCK_Q: tl.constexpr,  # query tokens a tile
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MIN_SPLIT_LEN: tl.constexpr,
    SPLITS: tl.constexpr,  # the most splits; 1: none
):
    """Grid: (num_kv_heads, query blocks, splits).

    The last blocks of a request see most keys, so blocks start from the end.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    request, block = _find_request(query_start_loc, block, first_req, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_token = block * BLOCK_Q  # of the request's new ones
    if first_token >= query_len:
        return
    num_before = tl.load(seq_lens + request) - query_len

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    q_head = kv_head * GROUP + rows % GROUP
    key_at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    out_rows = (start + tokens).to(tl.int64)
    q = tl.load(
        query + (out_rows * query_token_stride + q_head * query_head_stride)[:, None] + key_at[None, :],
        mask=is_row[:, None] & (key_at < KEY_DIM)[None, :],
        other=0.0,
    )

    # A row that saw no key yet has a finite top: a tile that its window hides altogether then adds zeros to it.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # one more key, whose value is zero
        if split == 0:
            top = tl.load(sinks + q_head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)

    # Keys in order: tiles that the window hides from some rows, tiles that all rows see, and the causal edge.
    positions = num_before + tokens
    first_position = num_before + first_token
    last_position = num_before + tl.minimum(first_token + BLOCK_Q, query_len) - 1
    end = last_position + 1
    edge = (first_position + 1) // BLOCK_N * BLOCK_N
    begin = 0
    first = 0
    blocks = block_table + request.to(tl.int64) * block_table_stride
    if key_scale is not None:  # a factor of all keys of a head is one of its scores
        scale = scale * tl.load(key_scale + kv_head)
    keys = key_cache + kv_head * KEY_HEAD_STRIDE + key_at
    values = value_cache + kv_head * VALUE_HEAD_STRIDE + value_at
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        begin = tl.minimum(begin, edge)
    last = end
    num_active = 1
    if SPLITS > 1:  # each split that takes part has the same number of tiles, the last one perhaps fewer
        num_tiles = tl.cdiv(end - first, BLOCK_N)
        num_parts = tl.minimum(tl.num_programs(2), tl.cdiv(end - first, MIN_SPLIT_LEN))
        tiles_each = tl.cdiv(num_tiles, num_parts)
        num_active = tl.cdiv(num_tiles, tiles_each)
        if split >= num_active:
            return
        first += split * tiles_each * BLOCK_N
        last = tl.minimum(first + tiles_each * BLOCK_N, end)
        begin = tl.minimum(tl.maximum(begin, first), last)
        edge = tl.minimum(tl.maximum(edge, begin), last)
    if HAS_WINDOW:
        acc, total, top = _attend(
            acc, total, top, q, positions, blocks, keys, values, first, begin, end, scale, softcap, window,
            KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, KEY_DIM, VALUE_DIM,
            KEY_BLOCK, VALUE_BLOCK, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    else:
        begin = first
    acc, total, top = _attend(
        acc, total, top, q, positions, blocks, keys, values, begin, edge, end, scale, softcap, window,
        KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, KEY_DIM, VALUE_DIM,
        KEY_BLOCK, VALUE_BLOCK, BLOCK_SIZE, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, positions, blocks, keys, values, edge, last, end, scale, softcap, window,
        KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, KEY_DIM, VALUE_DIM,
        KEY_BLOCK, VALUE_BLOCK, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    if value_scale is not None:
        acc = acc * tl.load(value_scale + kv_head)
    if num_active == 1:
        tl.store(
            out + ((out_rows * NUM_Q_HEADS + q_head) * VALUE_DIM)[:, None] + value_at[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=is_row[:, None] & (value_at < VALUE_DIM)[None, :],
        )
    elif SPLITS > 1:
        # A row may see no key of this split, as at the causal edge: its share then weighs nothing.
        num_heads = tl.num_programs(0)
        first_part = tl.program_id(1) * tl.num_programs(2) * num_heads + kv_head
        partial = (first_part + split * num_heads) * BLOCK_M + rows
        sees_any = total > 0
        tl.store(partial_lse + partial, tl.where(sees_any, top + tl.log2(total), float("-inf")), mask=is_row)
        tl.store(
            partial_out + partial[:, None] * VALUE_DIM + value_at[None, :],
            acc / tl.where(sees_any, total, 1.0)[:, None],
            mask=is_row[:, None] & (value_at < VALUE_DIM)[None, :],
        )
        tl.debug_barrier()  # all threads have stored before one of them counts the arrival
        arrival = arrivals + tl.program_id(1) * num_heads + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_active - 1:
            tl.store(arrival, 0)  # for the next launch; no program of this one reads it again
            num_rows = tl.minimum(query_len - first_token, BLOCK_Q) * GROUP
            for first_row in range(0, num_rows, COMBINE_ROWS):
                _combine(
                    start + first_token, kv_head * GROUP, first_row, num_rows, first_part, num_heads, num_active,
                    partial_out, partial_lse, out,
                    NUM_Q_HEADS, GROUP, VALUE_DIM, VALUE_BLOCK, BLOCK_M, SPLITS, COMBINE_ROWS,
                )  # fmt: skip


@own_kernel
@triton.jit
def _combine(  # type: ignore[no-untyped-def]  # compiled by Triton
    first_token,  # of the tile, in the batch
    first_head,  # of the KV head's group
    first_row,  # of the tile
    num_rows,  # of the tile
    first_part,  # where the tile's first split lies in `partial_out`
    apart,  # from each split to the next
    num_active,
    partial_out,
    partial_lse,
    out,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
):
    """Combine all splits of `COMBINE_ROWS` rows of a tile, with one memory access."""
    rows = first_row + tl.arange(0, COMBINE_ROWS)
    is_row = rows < num_rows
    value_at = tl.arange(0, VALUE_BLOCK)
    _, total, acc = add_splits(
        first_part, rows, is_row, 0, num_active, first_part + apart, apart, partial_out, partial_lse,
        tl.full([COMBINE_ROWS], float("-inf"), tl.float32), tl.zeros([COMBINE_ROWS], tl.float32),
        tl.zeros([COMBINE_ROWS, VALUE_BLOCK], tl.float32), BLOCK_M, VALUE_DIM, VALUE_BLOCK, SPLITS,
    )  # fmt: skip
    to = (first_token + rows // GROUP).to(tl.int64) * NUM_Q_HEADS + first_head + rows % GROUP
    tl.store(
        out + to[:, None] * VALUE_DIM + value_at[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_at < VALUE_DIM)[None, :],
    )


@own_kernel
@triton.jit
def _find_request(query_start_loc, block, first_req, num_reqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the request that a block of the grid belongs to, and which of that request's blocks it is.

    Request `r` starts at block `rows before it // BLOCK_Q + requests before it`, which leaves room for its
    last block to be partly filled. All starts are compared at once: a search would wait for each step's load.
    """
    CHUNK: tl.constexpr = 256
    base = tl.load(query_start_loc + first_req)
    num_started = 0
    for first in range(first_req, num_reqs, CHUNK):
        requests = first + tl.arange(0, CHUNK)
        starts = tl.load(query_start_loc + requests, mask=requests < num_reqs, other=0)
        starts = (starts - base) // BLOCK_Q + requests - first_req
        num_started += tl.sum(((starts <= block) & (requests < num_reqs)).to(tl.int32), axis=0)
    request = first_req + num_started - 1
    start = (tl.load(query_start_loc + request) - base) // BLOCK_Q + num_started - 1
    return request, block - start


@own_kernel
@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # compiled by Triton
    acc,
    total,
    top,
    q,
    query_positions,
    blocks,
    keys,
    values,
    first,
    last,
    end,
    scale,
    softcap,
    window,
    KEY_BLOCK_STRIDE: tl.constexpr,
    KEY_TOKEN_STRIDE: tl.constexpr,
    VALUE_BLOCK_STRIDE: tl.constexpr,
    VALUE_TOKEN_STRIDE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Continue over the tiles from `first`, a multiple of BLOCK_N, to `last`.

    Unless `MASKED`, every row sees all of their keys. No key at `end` or after is read.
    """
    ONE_PAGE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    is_key = (tl.arange(0, KEY_BLOCK) < KEY_DIM)[None, :]
    is_value = (tl.arange(0, VALUE_BLOCK) < VALUE_DIM)[None, :]
    next_pages = load_pages(blocks, first, end, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
    for start in range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        pages = next_pages
        next_pages = load_pages(blocks, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        key_rows = cache_rows(pages, start, BLOCK_SIZE, BLOCK_N, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, ONE_PAGE)
        value_rows = cache_rows(pages, start, BLOCK_SIZE, BLOCK_N, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, ONE_PAGE)
        positions = start + tl.arange(0, BLOCK_N)
        if MASKED:
            is_there = positions < end
            if HAS_WINDOW:  # what no row sees may be another request's by now, or NaN, which a weight of 0 keeps
                is_there = is_there & (positions > tl.min(query_positions, axis=0) - window)
            is_there = is_there[:, None]
            k = tl.load(keys[None, :] + key_rows[:, None], mask=is_there & is_key, other=0.0)
            v = tl.load(values[None, :] + value_rows[:, None], mask=is_there & is_value, other=0.0)
        else:
            k = tl.load(keys[None, :] + key_rows[:, None], mask=is_key, other=0.0)
            v = tl.load(values[None, :] + value_rows[:, None], mask=is_value, other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # those of e4m3; others are what they were
        scores = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            is_visible = positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, total, top
