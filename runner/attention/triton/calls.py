"""The kernels that a batch takes, in the order of their launches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from piecegraph.compiler.graphs.replay.step_kinds import value_kind
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.kernels.decode import decode_call
from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call
from piecegraph.runner.attention.triton.kernels.launch import KernelCall
from piecegraph.runner.attention.triton.kernels.prefill import prefill_call
from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import PrefillConfig, prefill_config
from piecegraph.runner.attention.triton.metadata import TritonMetadata


class LayerCall(NamedTuple):
    """One layer's call and cache: the launches of any batch."""

    call: AttentionCall
    kv_cache: KVCache

    @property
    def shape(self) -> HeadShape:
        """The shape of the layer's heads."""
        return HeadShape.of(self.call.query, self.call.value)

    def tensors(self, metadata: TritonMetadata) -> dict[str, torch.Tensor | None]:
        """Return the tensors that stay the same from batch to batch, by the names of the kernels' arguments."""
        call, rotary, scales, workspace = self.call, self.call.rotary, self.kv_cache.scales, metadata.workspace
        assert workspace is not None
        return {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "out": call.out,
            "sinks": call.sinks,
            "cos": None if rotary is None else rotary.cos,
            "sin": None if rotary is None else rotary.sin,
            "q_norm_weight": None if rotary is None else rotary.q_norm_weight,
            "k_norm_weight": None if rotary is None else rotary.k_norm_weight,
            "key_cache": self.kv_cache.key,
            "value_cache": self.kv_cache.value,
            "key_scale": None if scales is None else scales.key,
            "value_scale": None if scales is None else scales.value,
            "key_shift": None if scales is None else scales.key_shift,
            "partial_out": workspace.out,
            "partial_lse": workspace.lse,
            "arrivals": workspace.arrivals,
        }

    def kind(self, tensors: dict[str, torch.Tensor | None]) -> Hashable:
        """Return all that launches of the layer depend on but batches, the name, and the addresses of `tensors`."""
        rotary = self.call.rotary
        numbers = [value for value in self.call._replace(layer="", rotary=None) if not isinstance(value, torch.Tensor)]
        return (
            *map(value_kind, numbers),
            value_kind(None if rotary is None else (rotary.norm_eps, rotary.norm_offset)),
            *map(value_kind, tensors.values()),
        )

    def decode(self, metadata: TritonMetadata, num_reqs: int, config: DecodeConfig) -> KernelCall:
        """Return the launch for the first `num_reqs` requests, which have one new token each."""
        assert metadata.workspace is not None
        return decode_call(
            self.call,
            self.kv_cache,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            slot_mapping=metadata.slot_mapping,
            num_reqs=num_reqs,
            workspace=metadata.workspace,
            config=config,
        )

    def kv_write(self, metadata: TritonMetadata) -> KernelCall:
        """Return the launch that writes the keys and values of all tokens and rotates the other requests' queries."""
        return kv_write_call(
            self.call.key,
            self.call.value,
            kv_cache=self.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=0,
            first_query=metadata.num_decode_reqs,
            num_tokens=metadata.num_tokens,
            query=self.call.query,
            rotary=self.call.rotary,
        )

    def prefill(self, metadata: TritonMetadata, config: PrefillConfig) -> KernelCall:
        """Return the launch for all requests after the decode requests."""
        assert metadata.gpu is not None
        return prefill_call(
            self.call,
            self.kv_cache,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            first_req=metadata.num_decode_reqs,
            num_reqs=metadata.num_reqs,
            num_rows=metadata.num_tokens - metadata.num_decode_reqs,
            config=config,
            workspace=metadata.workspace,
            max_len=metadata.max_len,
            num_sms=metadata.gpu.num_sms,
        )


def kernel_calls(layer: LayerCall, metadata: TritonMetadata) -> Iterator[KernelCall]:
    """Yield the launches of a batch in order. Decode requests and all others share no row of `out`.

    A request may read what another computes in the same step, where their tokens begin alike. So in a mixed batch
    all keys and values are written first. The decode kernel comes last: the kernel after it may start while it still
    runs (`passes/kernels/common/overlapped.py`), and it reads cached keys and values before the preceding kernel has
    ended, so that one must not be the kernel that writes them.
    """
    assert metadata.gpu is not None
    shape, num_decode_reqs = layer.shape, metadata.num_decode_reqs
    if num_decode_reqs < metadata.num_reqs:
        yield layer.kv_write(metadata)
        yield layer.prefill(
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
        yield layer.decode(metadata, num_decode_reqs, config)
