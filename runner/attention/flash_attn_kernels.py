"""The flash-attn family's calls: one class a package, which knows its arguments. Each writes `out` in place.

Where a package's public function has no `out`, the function that one calls is called instead; flash-attn 3's
differs between builds, so there the result is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from piecegraph.runner.attention.flash_attn_packages import Family
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.kv_cache import KVCache


class LayerTensors(NamedTuple):
    """One layer's call, except for the batch. Heads may lie anywhere, a head's numbers next to each other."""

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], contiguous, written
    scale: float
    window: int  # keys a query sees, itself included; 0: all before it
    softcap: float  # 0.0: none
    sinks: torch.Tensor | None  # [num_q_heads]
    kv_cache: KVCache  # this step's keys and values are in it
    rotary: Rotary | None = None  # what query and key still needed; the kernels here find them rotated


class DecodeBatch(NamedTuple):
    """Requests with one row each, the first rows of the batch. A `seq_lens` of 0 is padding."""

    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32


class RaggedBatch(NamedTuple):
    """Requests with any number of rows; those before `first_row` belong to others."""

    first_row: int
    max_query_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32, from `first_row` on
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32


class FlashKernel(Protocol):
    def decode(self, layer: LayerTensors, batch: DecodeBatch) -> None: ...

    def prefill(self, layer: LayerTensors, batch: RaggedBatch) -> None: ...


def _window(layer: LayerTensors) -> tuple[int, int]:
    """Keys seen before and after a query's own; -1 is any number."""
    return (layer.window - 1, 0) if layer.window else (-1, -1)


class FlashAttn2:
    """`flash_attn_2_cuda`, the compiled part of flash-attn 2.7 and 2.8. Its arguments have no names."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def decode(self, layer: LayerTensors, batch: DecodeBatch) -> None:
        """The number of splits follows from the shapes alone: the block table's width, not `seq_lens`."""
        num_reqs, num_kv_heads = batch.seq_lens.shape[0], layer.kv_cache.key.shape[2]
        query, out = layer.query[:num_reqs], layer.out[:num_reqs]
        if layer.window:
            query, out = query.unsqueeze(1), out.unsqueeze(1)
        else:
            # Query heads of one KV head become rows of one request, which read its keys once. The extension
            # would do so itself, but into an `out` of its own.
            query, out = (x.unflatten(1, (num_kv_heads, -1)).transpose(1, 2) for x in (query, out))
        self._extension.fwd_kvcache(
            query, layer.kv_cache.key, layer.kv_cache.value,
            None, None,  # new keys and values
            batch.seq_lens,
            None, None, None, None,  # rotary cosine and sine, batch index, left padding
            batch.block_table,
            None,  # ALiBi
            out, layer.scale,
            False,  # causal: a last row sees all keys
            *_window(layer), layer.softcap,
            True,  # interleaved rotary
            0,  # as many splits as it thinks best
        )  # fmt: skip

    def prefill(self, layer: LayerTensors, batch: RaggedBatch) -> None:
        self._extension.varlen_fwd(
            layer.query, layer.kv_cache.key, layer.kv_cache.value, layer.out,
            batch.query_start_loc,
            batch.query_start_loc,  # of keys: checked, and not used with a block table and lengths
            batch.seq_lens,
            None,  # left padding
            batch.block_table,
            None,  # ALiBi
            max(batch.max_query_len, 2),  # for 1 it would write an `out` of its own
            batch.block_table.shape[1] * layer.kv_cache.key.shape[1],
            0.0,  # dropout
            layer.scale,
            False,  # zero `out` first
            True,  # causal
            *_window(layer), layer.softcap,
            False, None,  # no probabilities, no generator
        )  # fmt: skip


class FlashAttn3:
    """`flash_attn_interface.flash_attn_with_kvcache`."""

    def __init__(self, with_kvcache: Callable[..., torch.Tensor]) -> None:
        self._with_kvcache = with_kvcache

    def decode(self, layer: LayerTensors, batch: DecodeBatch) -> None:
        num_reqs = batch.seq_lens.shape[0]
        found = self._attend(layer, layer.query[:num_reqs].unsqueeze(1), batch)
        layer.out[:num_reqs].copy_(found.squeeze(1))

    def prefill(self, layer: LayerTensors, batch: RaggedBatch) -> None:
        found = self._attend(
            layer, layer.query, batch, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len
        )
        layer.out[batch.first_row :].copy_(found[batch.first_row :])

    def _attend(
        self, layer: LayerTensors, query: torch.Tensor, batch: DecodeBatch | RaggedBatch, **options: Any
    ) -> torch.Tensor:
        return self._with_kvcache(
            query,
            layer.kv_cache.key,
            layer.kv_cache.value,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window(layer),
            softcap=layer.softcap,
            **options,
        )


class FlashAttn4:
    """`flash_attn.cute.interface._flash_attn_fwd`. Compiles once for a kind of layer."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self._forward = forward

    def decode(self, layer: LayerTensors, batch: DecodeBatch) -> None:
        raise AssertionError("flash-attn 4 is not chosen for decoding")

    def prefill(self, layer: LayerTensors, batch: RaggedBatch) -> None:
        """No `max_seqlen_q`: the grid then follows from the rows there are, and one kernel serves any lengths."""
        left, right = (layer.window - 1, 0) if layer.window else (None, None)
        self._forward(
            layer.query,
            layer.kv_cache.key,
            layer.kv_cache.value,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            page_table=batch.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size_left=left,
            window_size_right=right,
            softcap=layer.softcap,
            learnable_sink=None if layer.sinks is None else layer.sinks.detach(),
            out=layer.out,
        )


def load_kernel(family: Family) -> FlashKernel:
    """Imports the package, which `installed` must have found."""
    if family is Family.FA2:
        return FlashAttn2(import_module("flash_attn_2_cuda"))
    if family is Family.FA3:
        return FlashAttn3(import_module("flash_attn_interface").flash_attn_with_kvcache)
    assert family is Family.FA4, family
    return FlashAttn4(import_module("flash_attn.cute.interface")._flash_attn_fwd)
