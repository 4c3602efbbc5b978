"""Which kernels a batch takes, in what order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from piecegraph.runner.attention.kernels.decode import decode_call
from piecegraph.runner.attention.kernels.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.kernels.head_shape import HeadShape
from piecegraph.runner.attention.kernels.kv_write import kv_write_call
from piecegraph.runner.attention.kernels.launch import (
    KernelCall,
)
from piecegraph.runner.attention.kernels.prefill import prefill_call
from piecegraph.runner.attention.kernels.prefill_config import PrefillConfig, prefill_config
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.attention.triton_metadata import TritonMetadata
from piecegraph.runner.kv_cache import KVCache


class LayerCall(NamedTuple):
    """One layer's call, except for the batch."""

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], written
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None  # [num_q_heads]
    kv_cache: KVCache
    rotary: Rotary | None = None  # what query and key still need

    @property
    def shape(self) -> HeadShape:
        return HeadShape.of(self.query, self.value)

    def decode(self, metadata: TritonMetadata, num_reqs: int, config: DecodeConfig) -> KernelCall:
        assert metadata.workspace is not None
        return decode_call(
            self.query,
            self.key,
            self.value,
            self.out,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_cache=self.kv_cache,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            slot_mapping=metadata.slot_mapping,
            num_reqs=num_reqs,
            workspace=metadata.workspace,
            config=config,
            rotary=self.rotary,
        )

    def kv_write(self, metadata: TritonMetadata) -> KernelCall:
        return kv_write_call(
            self.key,
            self.value,
            kv_cache=self.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=0,
            first_query=metadata.num_decode_reqs,
            num_tokens=metadata.num_tokens,
            query=self.query,
            rotary=self.rotary,
        )

    def prefill(self, metadata: TritonMetadata, config: PrefillConfig) -> KernelCall:
        return prefill_call(
            self.query,
            self.out,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_cache=self.kv_cache,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            first_req=metadata.num_decode_reqs,
            num_reqs=metadata.num_reqs,
            num_rows=metadata.num_tokens - metadata.num_decode_reqs,
            config=config,
        )


def kernel_calls(call: LayerCall, metadata: TritonMetadata) -> Iterator[KernelCall]:
    """What the batch takes, in order. Decode requests and all others share no row of `out`.

    A request may read what another computes in this very step, where their tokens begin alike. So in a mixed batch
    all keys and values are written first. Decode comes last: the kernel after it may start while it still works
    (`passes/kernels/overlapped.py`), and it reads cached keys and values before the kernel ahead of it has ended,
    which must not be the one that writes them.
    """
    assert metadata.gpu is not None
    shape, num_decode_reqs = call.shape, metadata.num_decode_reqs
    if num_decode_reqs < metadata.num_reqs:
        yield call.kv_write(metadata)
        yield call.prefill(
            metadata,
            prefill_config(shape, max_query_len=metadata.max_query_len, shared_bytes=metadata.gpu.shared_bytes),
        )
    if num_decode_reqs > 0:
        config = decode_config(
            shape,
            num_reqs=num_decode_reqs,
            max_len=metadata.max_len,
            num_sms=metadata.gpu.num_sms,
            shared_bytes=metadata.gpu.shared_bytes,
            can_overlap=metadata.gpu.can_overlap,
        )
        yield call.decode(metadata, num_decode_reqs, config)
