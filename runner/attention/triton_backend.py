"""Attention by our Triton kernels, which read the paged cache in place and fit any CUDA graph.

Requests with one new token go to the decode kernel, which writes their keys and values itself: a decode
step is one launch a layer. All others take two: their keys and values are written, then the general
kernel runs. Norm and rotary embedding of query and key, where they are asked for, are part of the first
launch of either. On a CPU the kernels' torch references run instead, under the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from piecegraph.runner.attention.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.kernels.prefill_config import MAX_GROUP
from piecegraph.runner.attention.kernels.reference import paged_attention, rotated, write_kv
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.attention.triton_metadata import TritonMetadata, TritonMetadataBuilder
from piecegraph.runner.kv_cache import KVCache

if TYPE_CHECKING:
    from piecegraph.runner.attention.kernels.launch import KernelPreparer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
"""The compute capability that brought bfloat16 and asynchronous copies."""


class TritonBackend(AttentionBackend):
    name: ClassVar[str] = "triton"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    patches_graphs: ClassVar[bool] = True

    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        return next(filter(None, map(layer_unsupported_reason, layers)), None)

    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        if device.type == "cpu":
            return None  # plain torch, which takes anything
        if device.type != "cuda":
            return f"its kernels run on NVIDIA GPUs (and as plain torch on a CPU), not on {device.type!r}."
        if find_spec("triton") is None:
            return "the package triton is not installed."
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return "its kernels need compute capability 8.0, and this GPU has {}.{}.".format(*capability)
        return self.layers_unsupported_reason(layers, block_size)

    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> TritonMetadataBuilder:
        return TritonMetadataBuilder.allocate(layers, block_size, device, max_num_reqs)

    def impl(self) -> TritonImpl:
        return TritonImpl()


def layer_unsupported_reason(layer: AttentionLayer) -> str | None:
    """Why our kernels cannot run this layer, or None."""
    if layer.dtype not in DTYPES:
        return f"{layer.name} computes in {layer.dtype}; the kernels have {', '.join(map(str, DTYPES))}."
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
    def __init__(self) -> None:
        self._preparer: KernelPreparer | None = None  # one for all layers and buckets; needs Triton

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rotary: Rotary | None = None,
    ) -> None:
        """Tokens and heads may lie anywhere (slices of a merged projection do), a head's numbers next to each
        other; `out` is contiguous. Rows of padding in `out` are not written. With `rotary`, rows of `query` that are
        not of decode requests are rotated in place on a GPU."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if metadata.gpu is None:
            if rotary is not None:
                rows = slice(metadata.num_tokens)
                query, key = rotated(query[rows], key[rows], rotary, rows)
            write_kv(key, value, kv_cache=kv_cache, slot_mapping=metadata.slot_mapping)
            paged_attention(
                query,
                out,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                kv_cache=kv_cache,
                query_start_loc=metadata.query_start_loc,
                seq_lens=metadata.seq_lens,
                block_table=metadata.block_table,
            )
            return
        from piecegraph.runner.attention.triton_calls import LayerCall, kernel_calls

        layer = LayerCall(query, key, value, out, scale, window, softcap, sinks, kv_cache, rotary)
        for call in kernel_calls(layer, metadata):
            call.launch()

    def prepare(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
        kv_cache: KVCache,
        rotary: Rotary | None = None,
    ) -> Callable[[AttentionMetadata], None]:
        """`forward` over tensors that stay where they are: what is returned takes a step's metadata and launches."""
        if query.device.type == "cpu":
            return lambda metadata: self.forward(
                query, key, value, out,
                scale=scale, window=window, softcap=softcap, sinks=sinks, kv_cache=kv_cache, metadata=metadata,
                rotary=rotary,
            )  # fmt: skip
        from piecegraph.runner.attention.kernels.launch import KernelPreparer
        from piecegraph.runner.attention.prepared_attention import PreparedAttention
        from piecegraph.runner.attention.triton_calls import LayerCall

        if self._preparer is None:
            self._preparer = KernelPreparer()
        call = LayerCall(query, key, value, out, scale, window, softcap, sinks, kv_cache, rotary)
        return PreparedAttention(call, self._preparer)
