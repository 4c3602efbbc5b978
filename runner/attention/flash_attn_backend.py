"""Attention by the flash-attn family: whichever of its packages is installed and can run the layers.

Keys and values are written by our own kernel; then requests with one new token go to one kernel and all others
to another, which may come from different packages (`choose_kernels`). Nothing of it runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from piecegraph.runner.attention.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.flash_attn_choice import Capability, FlashAttnKernels, choose_kernels
from piecegraph.runner.attention.flash_attn_kernels import FlashKernel, LayerTensors, load_kernel
from piecegraph.runner.attention.flash_attn_metadata import FlashAttnMetadata, FlashAttnMetadataBuilder
from piecegraph.runner.attention.flash_attn_packages import Family, installed
from piecegraph.runner.attention.flash_attn_probe import refusals
from piecegraph.runner.attention.kernels.reference import rotated, write_kv
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.attention.triton_backend import TritonImpl
from piecegraph.runner.kv_cache import KVCache

if TYPE_CHECKING:
    from piecegraph.runner.attention.kernels.launch import KernelPreparer

ASSUMED_CAPABILITY: Capability = (9, 0)
"""Of a GPU that is not here."""


class FlashAttnBackend(AttentionBackend):
    name: ClassVar[str] = "flash_attn"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER  # until it is fitted

    def __init__(self, kernels: FlashAttnKernels | None = None) -> None:
        """Without `kernels` it can only be asked and `fitted`."""
        self._kernels = kernels
        if kernels is not None:
            self.cudagraph_support = kernels.cudagraph_support

    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        return _reason(choose_kernels(installed(), ASSUMED_CAPABILITY, layers, block_size))

    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Tries the kernels on the device. Takes seconds where flash-attn 4 is installed, which compiles."""
        if device.type != "cuda":
            return f"its kernels run on NVIDIA GPUs, not on {device.type!r}."
        return _reason(_kernels_that_work(layers, device, block_size))

    def fitted(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> FlashAttnBackend:
        if torch.cuda.is_available():
            kernels = _kernels_that_work(layers, device, block_size)
        else:
            kernels = choose_kernels(installed(), ASSUMED_CAPABILITY, layers, block_size)
        assert isinstance(kernels, FlashAttnKernels), kernels
        return FlashAttnBackend(kernels)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._chosen.notes

    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> FlashAttnMetadataBuilder:
        return FlashAttnMetadataBuilder.allocate(self._chosen, layers, block_size, device, max_num_reqs)

    def impl(self) -> FlashAttnImpl:
        return FlashAttnImpl(self._chosen)

    @property
    def _chosen(self) -> FlashAttnKernels:
        assert self._kernels is not None, "flash_attn has no kernels before it is fitted to layers"
        return self._kernels


def _reason(kernels: FlashAttnKernels | str) -> str | None:
    return kernels if isinstance(kernels, str) else None


def _kernels_that_work(
    layers: Sequence[AttentionLayer], device: torch.device, block_size: int
) -> FlashAttnKernels | str:
    packages, capability = dict(installed()), torch.cuda.get_device_capability(device)
    while True:
        kernels = choose_kernels(packages, capability, layers, block_size)
        if isinstance(kernels, str):
            return kernels
        refused = refusals(kernels, layers, block_size, device)
        if not refused:
            return kernels
        packages |= refused


class FlashAttnImpl:
    def __init__(self, kernels: FlashAttnKernels, load: Callable[[Family], FlashKernel] = load_kernel) -> None:
        """Packages are imported at the first call; `load` is how."""
        self._kernels = kernels
        self._load = load
        self._loaded: dict[Family, FlashKernel] = {}
        self._triton = TritonImpl()
        self._preparer: KernelPreparer | None = None  # one for all layers and buckets

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
        """As `TritonImpl.forward`; rows of padding in `out` may be written. With `rotary`, all rows of `query` that
        our own decode kernel does not take are rotated in place."""
        assert isinstance(metadata, FlashAttnMetadata), type(metadata)
        layer = LayerTensors(query, key, value, out, scale, window, softcap, sinks, kv_cache, rotary)
        if metadata.write_from < metadata.num_tokens:
            self._write(layer, metadata)
        self.attend(layer, metadata)
        if metadata.triton_decode is not None:  # last: it reads cached keys before the kernel ahead has ended
            self._triton.forward(
                query, key, value, out, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_cache=kv_cache,
                metadata=metadata.triton_decode, rotary=rotary,
            )  # fmt: skip

    def attend(self, layer: LayerTensors, metadata: FlashAttnMetadata) -> None:
        """What flash-attn's own kernels do of a step whose keys and values are written."""
        if metadata.decode is not None:
            self._kernel(self._kernels.decode).decode(layer, metadata.decode)
        if metadata.prefill is not None:
            self._kernel(self._kernels.prefill).prefill(layer, metadata.prefill)

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
        """`forward` over tensors that stay where they are. Our own kernels are launched at next to no cost of the
        host; flash-attn's are called as their packages do it."""
        layer = LayerTensors(query, key, value, out, scale, window, softcap, sinks, kv_cache, rotary)
        if query.device.type == "cpu":
            return lambda metadata: self.forward(
                query, key, value, out,
                scale=scale, window=window, softcap=softcap, sinks=sinks, kv_cache=kv_cache, metadata=metadata,
                rotary=rotary,
            )  # fmt: skip
        from piecegraph.runner.attention.flash_attn_prepared import PreparedFlashAttn
        from piecegraph.runner.attention.kernels.launch import KernelPreparer

        if self._preparer is None:
            self._preparer = KernelPreparer()
        decode = None
        if self._kernels.decode is Family.TRITON:
            decode = self._triton.prepare(
                query, key, value, out, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_cache=kv_cache,
                rotary=rotary,
            )  # fmt: skip
        return PreparedFlashAttn(self, layer, decode, self._preparer)

    def _kernel(self, family: Family) -> FlashKernel:
        if family not in self._loaded:
            self._loaded[family] = self._load(family)
        return self._loaded[family]

    def _write(self, layer: LayerTensors, metadata: FlashAttnMetadata) -> None:
        """Keys and values of the rows from `write_from` on; rotated, as their queries are then, in place."""
        rows = slice(metadata.write_from, metadata.num_tokens)
        if layer.key.device.type == "cpu":
            key = layer.key[rows]
            if layer.rotary is not None:
                query, key = rotated(layer.query[rows], key, layer.rotary, rows)
                layer.query[rows].copy_(query)
            write_kv(key, layer.value[rows], kv_cache=layer.kv_cache, slot_mapping=metadata.slot_mapping[rows])
            return
        from piecegraph.runner.attention.kernels.kv_write import kv_write_call

        kv_write_call(
            layer.key,
            layer.value,
            kv_cache=layer.kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=metadata.write_from,
            num_tokens=metadata.num_tokens,
            query=layer.query,
            rotary=layer.rotary,
        ).launch()
