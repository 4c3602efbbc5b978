"""A layer of a PIECEWISE bucket, bound to its tensors, for the flash_attn backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from piecegraph.passes.kernels.common.overlapped import current_stream
from piecegraph.runner.attention.flash_attn.metadata import FlashAttnMetadata
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call, kv_write_layout
from piecegraph.runner.attention.triton.kernels.launch import KernelPreparer, PreparedKernel
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape


class Attends(Protocol):
    """The part of `FlashAttnImpl` that runs flash-attn's own kernels."""

    def attend(self, call: AttentionCall, kv_cache: KVCache, metadata: FlashAttnMetadata) -> None:
        """Run flash-attn's own kernels as `FlashAttnImpl.attend` does."""


class PreparedFlashAttn:
    """`FlashAttnImpl.forward` for tensors that keep their addresses."""

    def __init__(
        self,
        impl: Attends,
        call: AttentionCall,
        kv_cache: KVCache,
        decode: Callable[[AttentionMetadata], None] | None,
        preparer: KernelPreparer,
    ) -> None:
        """`decode`: our own decode kernel, prepared, if that is what decodes."""
        self._impl = impl
        self._call = call
        self._kv_cache = kv_cache
        self._decode = decode
        self._preparer = preparer
        self._device = call.query.get_device()
        self._shape = HeadShape.of(call.query, call.value)
        self._kv_write: PreparedKernel | None = None

    def __call__(self, metadata: AttentionMetadata) -> None:
        """Run the layer; the metadata of all calls comes from one builder. The first call compiles the K/V write."""
        assert isinstance(metadata, FlashAttnMetadata), type(metadata)
        first, num_tokens = metadata.write_from, metadata.num_tokens
        if first < num_tokens:
            kv_write = self._kv_write or self._bound(metadata)
            layout = kv_write_layout(self._shape, num_tokens - first, self._call.rotary)
            kv_write.launch(
                layout.grid,
                current_stream(self._device),
                metadata.slot_mapping_address,
                first,
                num_tokens,
                layout.heads,
            )
        self._impl.attend(self._call, self._kv_cache, metadata)
        if metadata.triton_decode is not None:  # last: it reads cached keys before the preceding kernel has ended
            assert self._decode is not None
            self._decode(metadata.triton_decode)

    def _bound(self, metadata: FlashAttnMetadata) -> PreparedKernel:
        call = kv_write_call(
            self._call.key,
            self._call.value,
            kv_cache=self._kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=metadata.write_from,
            num_tokens=metadata.num_tokens,
            query=self._call.query,
            rotary=self._call.rotary,
        )
        self._kv_write = self._preparer.prepare(call, changing=("slot_mapping", "first_row", "num_tokens", "heads"))
        return self._kv_write
