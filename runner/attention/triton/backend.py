"""Attention by our Triton kernels, which read the paged cache in place and can be part of any CUDA graph.

Requests with one new token go to the decode kernel, which writes their keys and values itself: a decode
step is one launch a layer. All others take two launches: their keys and values are written, then the general
kernel runs. Norm and rotary embedding of query and key, where they are asked for, are part of the first
launch of either. On a CPU the kernels' torch references run instead, under the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.layouts.prefill_config import MAX_GROUP
from piecegraph.runner.attention.triton.metadata import TritonMetadata, TritonMetadataBuilder
from piecegraph.runner.attention.triton.reference import paged_attention, rotated, write_kv

if TYPE_CHECKING:
    from piecegraph.runner.attention.triton.kernels.launch import KernelPreparer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
"""The compute capability that brought bfloat16 and asynchronous copies."""


E4M3_CAPABILITY = (8, 9)
"""The compute capability that brought conversions of e4m3."""


class TritonBackend(AttentionBackend):
    """The backend over our own Triton kernels."""

    name: ClassVar[str] = "triton"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    patches_graphs: ClassVar[bool] = True

    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        """Return why the kernels cannot run one of these layers, or None."""
        return next(filter(None, map(layer_unsupported_reason, layers)), None)

    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Return why these layers cannot run on this device, or None."""
        if device.type == "cpu":
            return None  # plain torch, which takes anything
        if device.type != "cuda":
            return f"its kernels run on NVIDIA GPUs (and as plain torch on a CPU), not on {device.type!r}."
        if find_spec("triton") is None:
            return "the package triton is not installed."
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return "its kernels need compute capability 8.0, and this GPU has {}.{}.".format(*capability)
        if capability < E4M3_CAPABILITY and any(layer.cache_dtype is torch.float8_e4m3fn for layer in layers):
            return "keys and values in e4m3 need compute capability 8.9, and this GPU has {}.{}.".format(*capability)
        return self.layers_unsupported_reason(layers, block_size)

    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> TritonMetadataBuilder:
        """Return a builder that serves all layers and all graphs; it allocates the kernels' workspace."""
        return TritonMetadataBuilder.allocate(layers, block_size, device, max_num_reqs)

    def impl(self) -> TritonImpl:
        """Return an impl that serves all layers."""
        return TritonImpl()


def layer_unsupported_reason(layer: AttentionLayer) -> str | None:
    """Return why our kernels cannot run this layer, or None."""
    if layer.dtype not in DTYPES:
        return f"{layer.name} computes in {layer.dtype}; the kernels have {', '.join(map(str, DTYPES))}."
    if layer.cache_dtype not in (None, layer.dtype, torch.float8_e4m3fn):
        return f"{layer.name} keeps keys and values in {layer.cache_dtype}; the kernels read {layer.dtype}."
    if layer.is_latent:
        return f"{layer.name} keeps latents, whose values are part of its keys; the kernels take them apart."
    if layer.chunk_size:
        return f"{layer.name} attends within chunks of {layer.chunk_size} tokens; the kernels have windows."
    if layer.has_slopes:
        return f"{layer.name} adds a bias by position to its scores (ALiBi); the kernels add none."
    if max(layer.key_dim, layer.value_dim) > MAX_HEAD_DIM:
        return (
            f"{layer.name} has heads of {layer.key_dim} (keys) and {layer.value_dim} (values); the kernels go up to "
            f"{MAX_HEAD_DIM}."
        )
    if layer.num_q_heads > MAX_GROUP * layer.num_kv_heads:
        return (
            f"{layer.name} has {layer.num_q_heads // layer.num_kv_heads} query heads a KV head; the kernels take up "
            f"to {MAX_GROUP}."
        )
    return None


class TritonImpl:
    """One layer by our kernels or, on a CPU, by their references."""

    def __init__(self) -> None:
        self._preparer: KernelPreparer | None = None  # one for all layers and buckets; needs Triton

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Run one layer as `AttentionImpl.forward` does.

        Tokens and heads may lie anywhere (as slices of a merged projection do). Rows of padding in `call.out` are not
        written. With `call.rotary`, rows of `call.query` that are not of decode requests are rotated in place on a GPU.
        """
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if metadata.gpu is None:
            self._forward_on_cpu(call, kv_cache, metadata)
            return
        from piecegraph.runner.attention.triton.calls import LayerCall, kernel_calls

        for kernel in kernel_calls(LayerCall(call, kv_cache), metadata):
            kernel.launch()

    def prepare(self, call: AttentionCall, kv_cache: KVCache) -> Callable[[AttentionMetadata], None]:
        """Bind `forward` to tensors that keep their addresses; the result takes a step's metadata and launches."""
        if call.query.device.type == "cpu":
            return lambda metadata: self.forward(call, kv_cache, metadata)
        from piecegraph.runner.attention.triton.calls import LayerCall
        from piecegraph.runner.attention.triton.kernels.launch import KernelPreparer
        from piecegraph.runner.attention.triton.prepared import PreparedAttention

        if self._preparer is None:
            self._preparer = KernelPreparer()
        return PreparedAttention(LayerCall(call, kv_cache), self._preparer)

    @staticmethod
    def _forward_on_cpu(call: AttentionCall, kv_cache: KVCache, metadata: TritonMetadata) -> None:
        query, key = call.query, call.key
        if call.rotary is not None:
            rows = slice(metadata.num_tokens)
            query, key = rotated(query[rows], key[rows], call.rotary, rows)
        write_kv(key, call.value, kv_cache=kv_cache, slot_mapping=metadata.slot_mapping)
        paged_attention(
            call._replace(query=query),
            kv_cache,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
        )
