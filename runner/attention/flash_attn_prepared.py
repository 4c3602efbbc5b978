"""A layer of a PIECEWISE bucket, bound to its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from piecegraph.runner.attention.flash_attn_kernels import LayerTensors
from piecegraph.runner.attention.flash_attn_metadata import FlashAttnMetadata
from piecegraph.runner.attention.kernels.head_shape import HeadShape
from piecegraph.runner.attention.kernels.kv_write import kv_write_call, kv_write_layout
from piecegraph.runner.attention.kernels.launch import KernelPreparer, PreparedKernel, current_stream
from piecegraph.runner.attention.metadata import AttentionMetadata


class Attends(Protocol):
    def attend(self, layer: LayerTensors, metadata: FlashAttnMetadata) -> None: ...


class PreparedFlashAttn:
    """`FlashAttnImpl.forward` for tensors that stay where they are."""

    def __init__(
        self,
        impl: Attends,
        layer: LayerTensors,
        decode: Callable[[AttentionMetadata], None] | None,
        preparer: KernelPreparer,
    ) -> None:
        """`decode`: our own decode kernel, prepared, if it is what decodes."""
        self._impl = impl
        self._layer = layer
        self._decode = decode
        self._preparer = preparer
        self._device = layer.query.get_device()
        self._shape = HeadShape.of(layer.query, layer.value)
        self._kv_write: PreparedKernel | None = None

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Every call's metadata comes from one builder. The first compiles the K/V write."""
        assert isinstance(metadata, FlashAttnMetadata), type(metadata)
        first, num_tokens = metadata.write_from, metadata.num_tokens
        if first < num_tokens:
            kv_write = self._kv_write or self._bound(metadata)
            layout = kv_write_layout(self._shape, num_tokens - first, self._layer.rotary)
            kv_write.launch(
                layout.grid,
                current_stream(self._device),
                metadata.slot_mapping_address,
                first,
                num_tokens,
                layout.heads,
            )
        self._impl.attend(self._layer, metadata)
        if metadata.triton_decode is not None:  # last: it reads cached keys before the kernel ahead has ended
            assert self._decode is not None
            self._decode(metadata.triton_decode)

    def _bound(self, metadata: FlashAttnMetadata) -> PreparedKernel:
        call = kv_write_call(
            self._layer.key,
            self._layer.value,
            kv_cache=self._layer.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=metadata.write_from,
            num_tokens=metadata.num_tokens,
            query=self._layer.query,
            rotary=self._layer.rotary,
        )
        self._kv_write = self._preparer.prepare(call, changing=("slot_mapping", "first_row", "num_tokens", "heads"))
        return self._kv_write
