"""Attention of requests with one new token each, over the paged cache, in one launch.

The kernel uses split-KV as in Flash-Decoding, with all query heads of one KV head in one tile as in FlashAttention-2's
GQA packing. It differs in that the splits of a request are combined in the same launch (by the last to arrive); that
in a batch that fills the GPU only long requests are split (`long_requests.py`); that the new token's key and value
come from the arguments, so this kernel also writes them to the cache; and that query and key may come as they were
projected, and are normed and rotated as they are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import wait_for_preceding_kernel
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.kernels.launch import Grid, KernelCall
from piecegraph.runner.attention.triton.kernels.long_requests import longest, num_parts, part_number, parts_before
from piecegraph.runner.attention.triton.kernels.new_token import load_new_token
from piecegraph.runner.attention.triton.kernels.paged import (
    cache_rows,
    cache_strides,
    load_pages,
    log2_scores,
    scale_tensors,
    shift_tensor,
)
from piecegraph.runner.attention.triton.kernels.rotate import rotary_constants, rotary_tensors
from piecegraph.runner.attention.triton.kernels.splits import add_splits
from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig, heads_per_program, num_head_blocks
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape


def decode_grid(shape: HeadShape, num_reqs: int, config: DecodeConfig) -> Grid:
    """Return the grid of a launch over `num_reqs` requests."""
    if config.num_extra > 0:
        return num_head_blocks(shape), num_reqs + config.num_extra, 1
    return num_head_blocks(shape), num_reqs, config.num_splits


def padded_head(dim: int) -> int:
    """Return the numbers of a head in a tile: a power of two, and at least what tensor cores take."""
    padded: int = triton.next_power_of_2(dim)
    return max(16, padded)


def decode_call(
    call: AttentionCall,  # of num_reqs tokens or more
    kv_cache: KVCache,
    *,
    seq_lens: torch.Tensor,  # [>= num_reqs] int32, the new token included; 0: padding
    block_table: torch.Tensor,  # [>= num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor,  # [>= num_reqs] int64
    num_reqs: int,
    workspace: SplitWorkspace,
    config: DecodeConfig,
) -> KernelCall:
    """Return the launch for `num_reqs` requests; row `r` of `call.query` is request `r`'s only new token.

    With `call.rotary`, query and key are normed and rotated as they are loaded; both tensors stay as they are. Writes
    the first `num_reqs` rows of `call.out`, except those of padding, and the cache at the slots of `slot_mapping` that
    are not negative. Leaves `workspace.arrivals` zero. With `config.pdl`, lengths, blocks and cached keys and values
    are read before the preceding kernel in the stream has ended: it must not be the one that writes them.
    """
    query, key, value = call.query, call.key, call.value
    shape = HeadShape.of(query, value)
    assert call.out.is_contiguous() and query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert kv_cache.key.stride(3) == kv_cache.value.stride(3) == 1 and block_table.stride(1) == 1
    assert config.num_splits == 1 or config.num_partials(num_reqs) * shape.num_q_heads <= workspace.lse.shape[0], config
    options: dict[str, Any] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,  # explicit, because the default changes between versions
    }
    if config.pdl:
        options["launch_pdl"] = True
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        **rotary_tensors(call.rotary, shape.key_dim),
        "out": call.out,
        "sinks": call.sinks,
        "key_cache": kv_cache.key,
        "value_cache": kv_cache.value,
        **scale_tensors(kv_cache),
        **shift_tensor(kv_cache),
        "block_table": block_table,
        "seq_lens": seq_lens,
        "slot_mapping": slot_mapping,
        "partial_out": workspace.out,
        "partial_lse": workspace.lse,
        "arrivals": workspace.arrivals,
        "scale": float(call.scale),
        "softcap": float(call.softcap),
        "window": call.window,
        "block_table_stride": block_table.stride(0),
        "num_reqs": num_reqs,
        "num_splits": config.num_splits,
        "min_split_len": config.min_split_len,
        "few_splits": config.few_splits,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        **_decode_constants(call, kv_cache, shape, config),
    }
    return KernelCall(decode_kernel, decode_grid(shape, num_reqs, config), arguments, options)


def _decode_constants(call: AttentionCall, kv_cache: KVCache, shape: HeadShape, config: DecodeConfig) -> dict[str, Any]:
    """Return the values that the kernel is compiled for, in the order it takes them."""
    block_m, splits = heads_per_program(shape.group), config.split_bound
    return {
        **cache_strides(kv_cache),
        "NUM_Q_HEADS": shape.num_q_heads,
        "GROUP": shape.group,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_BLOCK": padded_head(shape.key_dim),
        "VALUE_BLOCK": padded_head(shape.value_dim),
        "BLOCK_SIZE": kv_cache.key.shape[1],
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "SPLITS": splits,
        "HAS_EXTRA": config.num_extra > 0,
        "SPLIT_TILE": min(splits, 16),
        "COMBINE_ROWS": min(triton.next_power_of_2(shape.group), 4),
        "HAS_WINDOW": call.window > 0,
        "HAS_SOFTCAP": call.softcap > 0.0,
        "CARRY_PAGES": config.carry_pages,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
        "PDL": config.pdl,
        "JOINT": shape.group < block_m
        and call.query.dtype == call.key.dtype == kv_cache.key.dtype
        and kv_cache.scales is None,
        **rotary_constants(call.rotary),
    }


@own_kernel
@triton.jit(
    do_not_specialize=["window", "block_table_stride", "num_reqs", "num_splits", "min_split_len", "few_splits"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "slot_mapping", "sinks"],
)
def decode_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    query,  # [num_reqs, NUM_Q_HEADS, KEY_DIM]
    key,  # [num_reqs, num_kv_heads, KEY_DIM]
    value,  # [num_reqs, num_kv_heads, VALUE_DIM]
    cos,  # [num_reqs, ROTARY_DIM] or None
    sin,  # the same
    q_norm_weight,  # [KEY_DIM] or None
    k_norm_weight,  # [KEY_DIM] or None
    norm_eps,
    norm_offset,
    cos_stride,
    sin_stride,
    out,  # [num_reqs, NUM_Q_HEADS, VALUE_DIM], written
    sinks,  # [NUM_Q_HEADS] or None
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, KEY_DIM], written at the new slots
    value_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM], written at the new slots
    key_scale,  # [num_kv_heads] float32, the factors of cached keys, or None
    value_scale,  # the same of values
    key_shift,  # [num_kv_heads, KEY_DIM] float32, subtracted from new keys, or None
    block_table,  # [num_reqs, max_blocks] int32
    seq_lens,  # [num_reqs] int32
    slot_mapping,  # [num_reqs] int64
    partial_out,  # [num_partials, NUM_Q_HEADS, VALUE_DIM] float32, written: first splits, then the others
    partial_lse,  # [num_partials, NUM_Q_HEADS] float32, written
    arrivals,  # [num_reqs, head blocks] int32, zero before and after
    scale,
    softcap,
    window,
    block_table_stride,
    num_reqs,
    num_splits,
    min_split_len,
    few_splits,  # a request is split into so many parts however short they are
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
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # KEY_DIM, padded to a power of two
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query heads a program, padded
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded
    HAS_EXTRA: tl.constexpr,  # the programs of all splits but a request's first precede those of the requests
    SPLIT_TILE: tl.constexpr,  # splits added up at a time
    COMBINE_ROWS: tl.constexpr,  # query heads added up at a time
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CARRY_PAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    JOINT: tl.constexpr,  # the tile of query heads has a row left for the new key
    ROTARY_DIM: tl.constexpr,  # numbers of a head that are rotated; 0: query and key come as they are used
    HAS_NORM: tl.constexpr,  # of query and key, before they are rotated
):
    """Compute one split of a block of heads of one request; the last split of a request to arrive combines them.

    Grid: (head blocks, num_reqs, num_splits) or, with `HAS_EXTRA`, (head blocks, some more than num_reqs, 1). KV
    heads are adjacent in the cache and in the grid.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M  # of one KV head
    ONE_PAGE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    head_block = tl.program_id(0)
    place = tl.program_id(1)
    split = tl.program_id(2)
    before = 0
    if HAS_EXTRA:  # these are first: long requests take the longest, and programs without a part end at once
        num_extra = tl.num_programs(1) - num_reqs
        if place < num_extra:
            if longest(num_reqs, seq_lens) <= min_split_len - BLOCK_N:  # no request has parts, tiles rounded up
                return
            place, split, before = part_number(
                place, num_reqs, seq_lens, window, num_splits, min_split_len, BLOCK_N, HAS_WINDOW
            )
        else:
            place -= num_extra
        if place >= num_reqs:
            return
    request = place.to(tl.int64)
    kv_head = head_block // HEAD_BLOCKS
    rows = head_block % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)  # of the KV head's group
    is_row = rows < GROUP
    q_head = kv_head * GROUP + rows
    key_at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    is_key = key_at < KEY_DIM
    is_value = value_at < VALUE_DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    # Nothing here depends on the length: these loads and the length's own are in flight together. What describes the
    # batch was written when the step began, before an ordinary kernel, so it is there already.
    seq_len = tl.load(seq_lens + request)
    slot = tl.load(slot_mapping + request)
    blocks = block_table + request * block_table_stride
    if HAS_WINDOW:
        next_pages = load_pages(blocks, 0, 0, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
    else:  # split s starts with tile s whatever the length, so the lookup need not wait for it
        next_pages = load_pages(blocks, split * BLOCK_N, block_table_stride * BLOCK_SIZE, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
    if seq_len <= 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return

    # The cache holds positions before the new one; a window hides those before `visible`. Tiles start at multiples
    # of BLOCK_N and are dealt to splits in turn; no split that takes part is empty.
    num_cached = seq_len - 1
    visible = 0
    if HAS_WINDOW:
        visible = tl.maximum(seq_len - window, 0)
    first_tile = visible // BLOCK_N
    num_active = 1
    if SPLITS > 1:
        num_active = num_parts(seq_len, window, num_splits, min_split_len, BLOCK_N, HAS_WINDOW, few_splits)
    if HAS_EXTRA:
        if num_active > 1:
            if split == 0:
                before = parts_before(place, seq_lens, window, num_splits, min_split_len, BLOCK_N, HAS_WINDOW)
            num_active = tl.minimum(num_active, 1 + tl.maximum(num_extra - before, 0))
    if split >= num_active:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    step = num_active * BLOCK_N
    first = (first_tile + split) * BLOCK_N
    end = num_cached

    if key_scale is not None:  # a factor of all keys of a head is one of its scores
        scale = scale * tl.load(key_scale + kv_head)
    keys = key_cache + kv_head * KEY_HEAD_STRIDE + key_at
    values = value_cache + kv_head * VALUE_HEAD_STRIDE + value_at
    if HAS_WINDOW:
        next_pages = load_pages(blocks, first, end, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
    q = tl.zeros([BLOCK_M, KEY_BLOCK], query.dtype.element_ty)
    top = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for start in range(first, tl.maximum(end, first + 1), step):
        start = tl.multiple_of(start, BLOCK_N)
        if CARRY_PAGES:
            pages = next_pages
            next_pages = load_pages(blocks, start + step, end, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        else:
            pages = load_pages(blocks, start, end, BLOCK_SIZE, BLOCK_N, ONE_PAGE)
        positions = start + tl.arange(0, BLOCK_N)
        is_visible = positions < end
        if HAS_WINDOW:  # what lies before it may be another request's by now, or NaN, which a weight of 0 keeps
            is_visible = is_visible & (positions >= visible)
        key_rows = cache_rows(pages, start, BLOCK_SIZE, BLOCK_N, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, ONE_PAGE)
        value_rows = cache_rows(pages, start, BLOCK_SIZE, BLOCK_N, VALUE_BLOCK_STRIDE, VALUE_TOKEN_STRIDE, ONE_PAGE)
        k = tl.load(keys[None, :] + key_rows[:, None], mask=is_visible[:, None] & is_key[None, :], other=0.0)
        v = tl.load(values[None, :] + value_rows[:, None], mask=is_visible[:, None] & is_value[None, :], other=0.0)
        if start == first:  # the first tiles are in flight: now load what the preceding kernel computes
            if PDL:
                wait_for_preceding_kernel()
            q, top, total, acc = load_new_token(
                request, head_block % HEAD_BLOCKS == 0, split == 0, slot, kv_head, q_head, rows,
                query, key, value, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_offset,
                cos_stride, sin_stride, sinks, key_cache, value_cache, key_scale, value_scale, key_shift, scale,
                softcap, query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
                value_head_stride, KEY_BLOCK_STRIDE, KEY_TOKEN_STRIDE, KEY_HEAD_STRIDE, VALUE_BLOCK_STRIDE,
                VALUE_TOKEN_STRIDE, VALUE_HEAD_STRIDE, GROUP, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, BLOCK_SIZE,
                BLOCK_M, HAS_SOFTCAP, PRECISION, JOINT, ROTARY_DIM, HAS_NORM,
            )  # fmt: skip
        k, v = k.to(q.dtype), v.to(q.dtype)  # those of e4m3; others are what they were
        scores = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    result = acc / total[:, None]
    if value_scale is not None:
        result = result * tl.load(value_scale + kv_head)

    if num_active == 1:
        tl.store(
            out + request * (NUM_Q_HEADS * VALUE_DIM) + q_head[:, None] * VALUE_DIM + value_at[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_value[None, :],
        )
    elif SPLITS > 1:
        # A request's first split has the row of its own number; `others` is where its others begin, `apart` their step.
        others = num_reqs + request
        apart = num_reqs
        if HAS_EXTRA:
            others = (num_reqs + before).to(tl.int64)
            apart = 1
        partial_row = tl.where(split == 0, request, others + (split - 1) * apart)
        partial = partial_row * NUM_Q_HEADS + q_head  # [BLOCK_M]
        tl.store(partial_lse + partial, top + tl.log2(total), mask=is_row)
        tl.store(
            partial_out + partial[:, None] * VALUE_DIM + value_at[None, :],
            result,
            mask=is_row[:, None] & is_value[None, :],
        )
        tl.debug_barrier()  # all threads have stored before one of them counts the arrival
        arrival = arrivals + request * tl.num_programs(0) + head_block
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_active - 1:
            tl.store(arrival, 0)  # for the next launch; no program of this one reads it again
            first_row = head_block % HEAD_BLOCKS * BLOCK_M
            for row in range(first_row, tl.minimum(first_row + BLOCK_M, GROUP), COMBINE_ROWS):
                _combine(
                    request, kv_head * GROUP, row,
                    num_active, others, apart, partial_out, partial_lse, out,
                    NUM_Q_HEADS, GROUP, VALUE_DIM, VALUE_BLOCK, SPLITS, SPLIT_TILE, COMBINE_ROWS,
                )  # fmt: skip


@own_kernel
@triton.jit
def _combine(  # type: ignore[no-untyped-def]  # compiled by Triton
    request,
    first_head,  # of the KV head's group
    first_row,  # of the group
    num_active,
    others,  # the row of the request's second split in `partial_out`
    apart,  # rows from each split to the next, from there on
    partial_out,
    partial_lse,
    out,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
):
    """Combine the splits of `COMBINE_ROWS` query heads, a tile of splits at a time, with one memory access each."""
    rows = first_row + tl.arange(0, COMBINE_ROWS)
    is_row = rows < GROUP
    heads = first_head + rows
    value_at = tl.arange(0, VALUE_BLOCK)
    top = tl.full([COMBINE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([COMBINE_ROWS], tl.float32)
    acc = tl.zeros([COMBINE_ROWS, VALUE_BLOCK], tl.float32)
    if SPLITS == SPLIT_TILE:
        top, total, acc = add_splits(
            request, heads, is_row, 0, num_active, others, apart, partial_out, partial_lse, top, total, acc,
            NUM_Q_HEADS, VALUE_DIM, VALUE_BLOCK, SPLIT_TILE,
        )  # fmt: skip
    else:
        for first in range(0, num_active, SPLIT_TILE):
            top, total, acc = add_splits(
                request, heads, is_row, first, num_active, others, apart, partial_out, partial_lse, top, total, acc,
                NUM_Q_HEADS, VALUE_DIM, VALUE_BLOCK, SPLIT_TILE,
            )  # fmt: skip
    result = acc / total[:, None]
    tl.store(
        out + (request * NUM_Q_HEADS + heads[:, None]) * VALUE_DIM + value_at[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_at < VALUE_DIM)[None, :],
    )
