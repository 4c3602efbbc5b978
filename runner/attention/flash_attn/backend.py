"""Attention by the flash-attn family: whichever of its packages is installed and can run the layers.

Keys and values are written by our own kernel; then requests with one new token go to one kernel and all others
to another, which may come from different packages (`choose_kernels`). The packages' kernels do not run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from piecegraph.runner.attention.flash_attn.choice import Capability, FlashAttnKernels, choose_kernels
from piecegraph.runner.attention.flash_attn.kernels import FlashKernel, load_kernel
from piecegraph.runner.attention.flash_attn.metadata import FlashAttnMetadata, FlashAttnMetadataBuilder
from piecegraph.runner.attention.flash_attn.packages import Family, installed
from piecegraph.runner.attention.flash_attn.probe import refusals
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.backend import TritonImpl
from piecegraph.runner.attention.triton.reference import rotated, write_kv

if TYPE_CHECKING:
    from piecegraph.runner.attention.triton.kernels.launch import KernelPreparer

ASSUMED_CAPABILITY: Capability = (9, 0)
"""The compute capability that is assumed where there is no GPU."""


class FlashAttnBackend(AttentionBackend):
    """The backend over the packages of the flash-attn family."""

    name: ClassVar[str] = "flash_attn"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER  # until it is fitted

    def __init__(self, kernels: FlashAttnKernels | None = None) -> None:
        """Without `kernels`, the backend can only answer questions and be `fitted`."""
        self._kernels = kernels
        if kernels is not None:
            self.cudagraph_support = kernels.cudagraph_support

    def layers_unsupported_reason(self, layers: Sequence[AttentionLayer], block_size: int) -> str | None:
        """Return why no installed kernels could run these layers on a Hopper GPU, or None."""
        return _reason(choose_kernels(installed(), ASSUMED_CAPABILITY, layers, block_size))

    def unsupported_reason(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> str | None:
        """Return why no installed kernels run these layers on this device, or None.

        Tries the kernels on the device, which takes seconds where flash-attn 4 is installed: it compiles.
        """
        if device.type != "cuda":
            return f"its kernels run on NVIDIA GPUs, not on {device.type!r}."
        return _reason(_kernels_that_work(layers, device, block_size))

    def fitted(self, layers: Sequence[AttentionLayer], device: torch.device, block_size: int) -> FlashAttnBackend:
        """Return this backend with the kernels that it runs these layers with."""
        if torch.cuda.is_available():
            kernels = _kernels_that_work(layers, device, block_size)
        else:
            kernels = choose_kernels(installed(), ASSUMED_CAPABILITY, layers, block_size)
        assert isinstance(kernels, FlashAttnKernels), kernels
        return FlashAttnBackend(kernels)

    @property
    def notes(self) -> tuple[str, ...]:
        """The kernels that were chosen, and the others with the reasons against them."""
        return self._chosen.notes

    def metadata_builder(
        self, layers: Sequence[AttentionLayer], block_size: int, device: torch.device, *, max_num_reqs: int
    ) -> FlashAttnMetadataBuilder:
        """Return a builder that serves all layers and all graphs."""
        return FlashAttnMetadataBuilder.allocate(self._chosen, layers, block_size, device, max_num_reqs)

    def impl(self) -> FlashAttnImpl:
        """Return an impl that serves all layers."""
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
    """One layer by flash-attn's kernels and our own."""

    def __init__(self, kernels: FlashAttnKernels, load: Callable[[Family], FlashKernel] = load_kernel) -> None:
        """`load` imports a package; it is called when the package is first needed."""
        self._kernels = kernels
        self._load = load
        self._loaded: dict[Family, FlashKernel] = {}
        self._triton = TritonImpl()
        self._preparer: KernelPreparer | None = None  # one for all layers and buckets

    def forward(self, call: AttentionCall, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Run one layer as `AttentionImpl.forward` does.

        Rows of padding in `call.out` may be written. With `call.rotary`, all rows of `call.query` that our own decode
        kernel does not take are rotated in place.
        """
        assert isinstance(metadata, FlashAttnMetadata), type(metadata)
        if metadata.write_from < metadata.num_tokens:
            self._write(call, kv_cache, metadata)
        self.attend(call, kv_cache, metadata)
        if metadata.triton_decode is not None:  # last: it reads cached keys before the preceding kernel has ended
            self._triton.forward(call, kv_cache, metadata.triton_decode)

    def attend(self, call: AttentionCall, kv_cache: KVCache, metadata: FlashAttnMetadata) -> None:
        """Run flash-attn's own kernels for a step whose keys and values are written."""
        if metadata.decode is not None:
            self._kernel(self._kernels.decode).decode(call, kv_cache, metadata.decode)
        if metadata.prefill is not None:
            self._kernel(self._kernels.prefill).prefill(call, kv_cache, metadata.prefill)

    def prepare(self, call: AttentionCall, kv_cache: KVCache) -> Callable[[AttentionMetadata], None]:
        """Bind `forward` to tensors that keep their addresses; the result takes a step's metadata and launches.

        Our own kernels are launched at next to no cost to the host; flash-attn's are called through their packages.
        """
        if call.query.device.type == "cpu":
            return lambda metadata: self.forward(call, kv_cache, metadata)
        from piecegraph.runner.attention.flash_attn.prepared import PreparedFlashAttn
        from piecegraph.runner.attention.triton.kernels.launch import KernelPreparer

        if self._preparer is None:
            self._preparer = KernelPreparer()
        decode = None
        if self._kernels.decode is Family.TRITON:
            decode = self._triton.prepare(call, kv_cache)
        return PreparedFlashAttn(self, call, kv_cache, decode, self._preparer)

    def _kernel(self, family: Family) -> FlashKernel:
        if family not in self._loaded:
            self._loaded[family] = self._load(family)
        return self._loaded[family]

    def _write(self, call: AttentionCall, kv_cache: KVCache, metadata: FlashAttnMetadata) -> None:
        """Write the keys and values of the rows from `write_from` on; with `call.rotary`, rotate their queries too."""
        rows = slice(metadata.write_from, metadata.num_tokens)
        if call.key.device.type == "cpu":
            key = call.key[rows]
            if call.rotary is not None:
                query, key = rotated(call.query[rows], key, call.rotary, rows)
                call.query[rows].copy_(query)
            write_kv(key, call.value[rows], kv_cache=kv_cache, slot_mapping=metadata.slot_mapping[rows])
            return
        from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call

        kv_write_call(
            call.key,
            call.value,
            kv_cache=kv_cache,
            slot_mapping=metadata.slot_mapping,
            first_row=metadata.write_from,
            num_tokens=metadata.num_tokens,
            query=call.query,
            rotary=call.rotary,
        ).launch()
