"""The flash-attn family's calls: one class a package, which knows its arguments. Each writes `out` in place.

Where a package's public function takes no `out`, we call the function underneath it; the one of flash-attn 3
differs between builds, so there the result is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall


class DecodeBatch(NamedTuple):
    """Requests with one row each, the first rows of the batch. A `seq_lens` of 0 is padding."""

    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32


class RaggedBatch(NamedTuple):
    """Requests with any number of rows; the rows before `first_row` belong to other requests."""

    first_row: int
    max_query_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32, from `first_row` on
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32


class FlashKernel(Protocol):
    """The kernels of one package. This step's keys and values are in the cache, and `call.query` is rotated."""

    def decode(self, call: AttentionCall, kv_cache: KVCache, batch: DecodeBatch) -> None:
        """Write the rows of `call.out` that belong to requests with one row each."""

    def prefill(self, call: AttentionCall, kv_cache: KVCache, batch: RaggedBatch) -> None:
        """Write the rows of `call.out` from `batch.first_row` on."""


def _window(call: AttentionCall) -> tuple[int, int]:
    """Return how many keys are seen before and after a query's own; -1 is any number."""
    return (call.window - 1, 0) if call.window else (-1, -1)


class FlashAttn2:
    """`flash_attn_2_cuda`, the compiled part of flash-attn 2.7 and 2.8. Its arguments have no names."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def decode(self, call: AttentionCall, kv_cache: KVCache, batch: DecodeBatch) -> None:
        """Run requests with one row each.

        The number of splits follows from the shapes alone: the block table's width, not `seq_lens`.
        """
        num_reqs, num_kv_heads = batch.seq_lens.shape[0], kv_cache.key.shape[2]
        query, out = call.query[:num_reqs], call.out[:num_reqs]
        if call.window:
            query, out = query.unsqueeze(1), out.unsqueeze(1)
        else:
            # Query heads of one KV head become rows of one request, which read its keys once. The extension
            # would do the same, but into an `out` of its own.
            query, out = (x.unflatten(1, (num_kv_heads, -1)).transpose(1, 2) for x in (query, out))
        self._extension.fwd_kvcache(
            query, kv_cache.key, kv_cache.value,
            None, None,  # new keys and values
            batch.seq_lens,
            None, None, None, None,  # rotary cosine and sine, batch index, left padding
            batch.block_table,
            None,  # ALiBi
            out, call.scale,
            False,  # causal: a last row sees all keys
            *_window(call), call.softcap,
            True,  # interleaved rotary
            0,  # the extension chooses the number of splits
        )  # fmt: skip

    def prefill(self, call: AttentionCall, kv_cache: KVCache, batch: RaggedBatch) -> None:
        """Run requests with any number of rows."""
        self._extension.varlen_fwd(
            call.query, kv_cache.key, kv_cache.value, call.out,
            batch.query_start_loc,
            batch.query_start_loc,  # of keys: checked, and not used with a block table and lengths
            batch.seq_lens,
            None,  # left padding
            batch.block_table,
            None,  # ALiBi
            max(batch.max_query_len, 2),  # for 1 it would write an `out` of its own
            batch.block_table.shape[1] * kv_cache.key.shape[1],
            0.0,  # dropout
            call.scale,
            False,  # zero `out` first
            True,  # causal
            *_window(call), call.softcap,
            False, None,  # no probabilities, no generator
        )  # fmt: skip


class FlashAttn3:
    """`flash_attn_interface.flash_attn_with_kvcache`."""

    def __init__(self, with_kvcache: Callable[..., torch.Tensor]) -> None:
        self._with_kvcache = with_kvcache

    def decode(self, call: AttentionCall, kv_cache: KVCache, batch: DecodeBatch) -> None:
        """Run requests with one row each."""
        num_reqs = batch.seq_lens.shape[0]
        found = self._attend(call, kv_cache, call.query[:num_reqs].unsqueeze(1), batch)
        call.out[:num_reqs].copy_(found.squeeze(1))

    def prefill(self, call: AttentionCall, kv_cache: KVCache, batch: RaggedBatch) -> None:
        """Run requests with any number of rows."""
        found = self._attend(
            call, kv_cache, call.query, batch, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len
        )
        call.out[batch.first_row :].copy_(found[batch.first_row :])

    def _attend(
        self,
        call: AttentionCall,
        kv_cache: KVCache,
        query: torch.Tensor,
        batch: DecodeBatch | RaggedBatch,
        **options: Any,
    ) -> torch.Tensor:
        return self._with_kvcache(
            query,
            kv_cache.key,
            kv_cache.value,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            softmax_scale=call.scale,
            causal=True,
            window_size=_window(call),
            softcap=call.softcap,
            **options,
        )


class FlashAttn4:
    """`flash_attn.cute.interface._flash_attn_fwd`, which compiles once for a kind of layer."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self._forward = forward

    def decode(self, call: AttentionCall, kv_cache: KVCache, batch: DecodeBatch) -> None:
        """Raise: flash-attn 4 never decodes (`choice.DECODE`)."""
        raise AssertionError("flash-attn 4 is not chosen for decoding")

    def prefill(self, call: AttentionCall, kv_cache: KVCache, batch: RaggedBatch) -> None:
        """Run requests with any number of rows.

        Without `max_seqlen_q` the grid follows from the number of rows, and one kernel serves any lengths.
        """
        left, right = (call.window - 1, 0) if call.window else (None, None)
        self._forward(
            call.query,
            kv_cache.key,
            kv_cache.value,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            page_table=batch.block_table,
            softmax_scale=call.scale,
            causal=True,
            window_size_left=left,
            window_size_right=right,
            softcap=call.softcap,
            learnable_sink=None if call.sinks is None else call.sinks.detach(),
            out=call.out,
        )


def load_kernel(family: Family) -> FlashKernel:
    """Import the package of `family`, which `installed` must have found, and return its kernels."""
    if family is Family.FA2:
        return FlashAttn2(import_module("flash_attn_2_cuda"))
    if family is Family.FA3:
        return FlashAttn3(import_module("flash_attn_interface").flash_attn_with_kvcache)
    assert family is Family.FA4, family
    return FlashAttn4(import_module("flash_attn.cute.interface")._flash_attn_fwd)
