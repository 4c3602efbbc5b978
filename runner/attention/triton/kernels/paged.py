"""Parts of kernels that locate keys and values in a paged cache, and that scale scores.

A tile is `BLOCK_N` consecutive positions of one request, starting at a multiple of `BLOCK_N`. If the
tile lies within one block (`ONE_PAGE`), one block number locates it; otherwise each position looks up its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.interface.kv_cache import KVCache

LOG2E = tl.constexpr(1.4426950408889634)


def cache_strides(kv_cache: KVCache) -> dict[str, int]:
    """Return the constants of a kernel that describe the layout of `kv_cache`, in the order kernels take them."""
    key, value = kv_cache.key, kv_cache.value
    return {
        "KEY_BLOCK_STRIDE": key.stride(0),
        "KEY_TOKEN_STRIDE": key.stride(1),
        "KEY_HEAD_STRIDE": key.stride(2),
        "VALUE_BLOCK_STRIDE": value.stride(0),
        "VALUE_TOKEN_STRIDE": value.stride(1),
        "VALUE_HEAD_STRIDE": value.stride(2),
    }


def scale_tensors(kv_cache: KVCache) -> dict[str, torch.Tensor | None]:
    """Return the arguments of a kernel for the factors of cached numbers, `[num_kv_heads]` float32 or None."""
    scales = kv_cache.scales
    return {
        "key_scale": None if scales is None else scales.key,
        "value_scale": None if scales is None else scales.value,
    }


def shift_tensor(kv_cache: KVCache) -> dict[str, torch.Tensor | None]:
    """Return the argument of a kernel that writes keys for what is subtracted from them, `[num_kv_heads, key_dim]`."""
    return {"key_shift": None if kv_cache.scales is None else kv_cache.scales.key_shift}


@own_kernel
@triton.jit
def shifted(x, shift, head, key_at, KEY_DIM: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return keys of a KV head less `shift[head]`, unless `shift` is None; `key_at` are the places of their numbers."""
    if shift is not None:
        x = x.to(tl.float32) - tl.load(shift + head * KEY_DIM + key_at, mask=key_at < KEY_DIM, other=0.0)
    return x


@own_kernel
@triton.jit
def as_cached(x, scale, head, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return keys or values of a KV head as its cache keeps them, divided by `scale[head]` unless `scale` is None.

    Values beyond the range of e4m3 become its largest ones.
    """
    if scale is not None:
        x = x.to(tl.float32) / tl.load(scale + head)
    if tl.float8e4nv == DTYPE:
        low = tl.maximum(x.to(tl.float32), -448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(low, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@own_kernel
@triton.jit
def load_pages(blocks, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Load the block numbers of the tile that starts at position `first`: int32, one, or `[BLOCK_N]`.

    `blocks`: the request's row of the block table. Entries at or after position `end` are not read.
    The function contains nothing but the load, so that a loop may carry its result: Triton's pipeliner moves a
    carried load before its use, but not one from which something was computed.
    """
    if ONE_PAGE:
        pages = tl.load(blocks + first // BLOCK_SIZE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK_N)
        pages = tl.load(blocks + positions // BLOCK_SIZE, mask=positions < end, other=0)
    return pages


@own_kernel
@triton.jit
def cache_rows(  # type: ignore[no-untyped-def]  # compiled by Triton
    pages,
    first,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Return element offsets `[BLOCK_N]` int64 of a tile's positions in a cache with these strides."""
    offsets = tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        tokens = first % BLOCK_SIZE + offsets
    else:
        tokens = (first + offsets) % BLOCK_SIZE
    return pages.to(tl.int64) * BLOCK_STRIDE + tokens * TOKEN_STRIDE


@own_kernel
@triton.jit
def log2_scores(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return scaled and capped scores in units of log 2, so that `exp2` gives their weights."""
    if HAS_SOFTCAP:
        # softcap * tanh(x); this form of tanh has the right limits where exp2 overflows
        doubled = tl.exp2(scores * (2 * scale / softcap * LOG2E))
        return (softcap * LOG2E) * (1 - 2 / (1 + doubled))
    return scores * (scale * LOG2E)
