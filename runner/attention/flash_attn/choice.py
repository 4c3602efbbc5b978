"""The choice of the flash-attn family's kernels for prefill and for decode: a pure function, with its reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.attention.flash_attn.packages import Family, Installed
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.triton.backend import layer_unsupported_reason

PREFILL = (Family.FA3, Family.FA4, Family.FA2)
DECODE = (Family.FA3, Family.FA2, Family.TRITON)
"""The families that can prefill and decode, fastest on an H200 first.

flash-attn 4 does not decode here: on an H200 it cannot split one request's keys between programs, and takes eight times
as long as the others for 32k keys.
"""

FA2_PAGE = 256
"""Tokens of which the pages of flash-attn 2 hold a multiple."""

FA3_TILE = 64
FA4_TILES = (64, 80, 96, 112, 128)
"""Keys that a program takes at a time (for FA3: the fewest).

Pages of as many tokens, or a multiple for FA3, are loaded whole, with rows that were never written: a NaN among them
spreads, because zero times NaN is NaN. Pages of any other size are loaded row by row, none past a request's end.
"""

DTYPES = (torch.bfloat16, torch.float16)

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttnKernels:
    """The kernels for requests with one new token (`decode`) and for all others (`prefill`)."""

    prefill: Family
    decode: Family
    notes: tuple[str, ...] = ()  # what was chosen, and why the others were not

    @property
    def cudagraph_support(self) -> AttentionCGSupport:
        """The batches for which these kernels may be part of a FULL graph.

        All kernels read lengths on the device and take grids and splits from the bucket and `max_model_len`, so
        graphs are right for any lengths. flash-attn 2 starts programs for every request times the longest query,
        which in a graph of any batch is all of its rows: there PIECEWISE is the better mode.
        """
        return AttentionCGSupport.UNIFORM_BATCH if self.prefill is Family.FA2 else AttentionCGSupport.ALWAYS


def choose_kernels(
    installed: Installed, capability: Capability, layers: Sequence[AttentionLayer], block_size: int
) -> FlashAttnKernels | str:
    """Return the kernels for these layers over blocks of `block_size` tokens, or the reason why there are none."""
    if installed[Family.TRITON] is not None:
        return f"triton, which writes keys and values, is {installed[Family.TRITON]}."
    prefill, not_prefill = _first(PREFILL, installed, capability, layers, block_size)
    if prefill is None:
        return f"none of its kernels can run. {' '.join(f'{reason}.' for reason in not_prefill)}"
    decode, not_decode = _first(DECODE, installed, capability, layers, block_size)
    if decode is None:
        return f"{prefill.value} could prefill, but nothing decode. {' '.join(f'{reason}.' for reason in not_decode)}"
    passed_over = dict.fromkeys((*not_prefill, *not_decode))
    notes = [f"prefill by {prefill.value}, decode by {decode.value}", *(f"not {reason}" for reason in passed_over)]
    if Family.FA4 in (prefill, decode):
        notes.append("flash-attn 4 compiles 2-3 s for a kind of layer when it is chosen, before graphs are captured")
    return FlashAttnKernels(prefill=prefill, decode=decode, notes=tuple(notes))


def _first(
    families: Sequence[Family],
    installed: Installed,
    capability: Capability,
    layers: Sequence[AttentionLayer],
    block_size: int,
) -> tuple[Family | None, list[str]]:
    reasons: list[str] = []
    for family in families:
        reason = installed[family] or _gpu_or_page_reason(family, capability, block_size)
        if reason is None:
            found = (_LAYER_REASONS[family](layer, capability) for layer in layers)
            reason = next(filter(None, found), None)
        if reason is None:
            return family, reasons
        reasons.append(f"{family.value}: {reason.rstrip('.')}")
    return None, reasons


def _gpu_or_page_reason(family: Family, capability: Capability, block_size: int) -> str | None:
    has = "this GPU has compute capability {}.{}".format(*capability)
    if family is Family.FA2:
        if capability < (8, 0):
            return f"it needs compute capability 8.0, and {has}"
        if block_size % FA2_PAGE:
            return f"its pages hold a multiple of {FA2_PAGE} tokens and block_size is {block_size}: give block_size=256"
    if family is Family.FA3:
        if capability != (9, 0):
            return f"it runs on Hopper alone (9.0), and {has}"
        if block_size >= FA3_TILE:
            return f"it may load pages of {FA3_TILE} tokens and more beyond a request's end: give block_size=16 or 32"
    if family is Family.FA4:
        if capability[0] not in (9, 10, 11):
            return f"it has paged K/V on Hopper and Blackwell (9.x to 11.x), and {has}"
        if block_size in FA4_TILES:
            return f"it loads pages of {block_size} tokens beyond a request's end: give block_size=16, 32 or 256"
    return None


def _head_reason(layer: AttentionLayer, sizes: str, fits: bool) -> str | None:
    if layer.is_latent:
        return f"{layer.name} keeps latents, whose values are part of its keys"
    if layer.chunk_size:
        return f"{layer.name} attends within chunks, and it has windows"
    if layer.has_slopes:
        return f"{layer.name} adds a bias by position to its scores (ALiBi), and here it is given none"
    if layer.cache_dtype not in (None, layer.dtype):
        return f"{layer.name} keeps keys and values in {layer.cache_dtype}; it reads {layer.dtype}"
    if layer.dtype not in DTYPES:
        return f"{layer.name} computes in {layer.dtype}; it has {' and '.join(map(str, DTYPES))}"
    if not fits:
        return f"{layer.name} has heads of {layer.key_dim} (keys) and {layer.value_dim} (values); it takes {sizes}"
    return None


def _fa2_or_fa3_reason(layer: AttentionLayer, capability: Capability) -> str | None:
    if layer.has_sinks:
        return f"{layer.name} has sinks, and it none"
    fits = layer.key_dim == layer.value_dim <= 256 and layer.key_dim % 8 == 0
    return _head_reason(layer, "equal ones, a multiple of 8 up to 256", fits)


def _fa4_reason(layer: AttentionLayer, capability: Capability) -> str | None:
    dims = (layer.key_dim, layer.value_dim)
    largest = 256 if capability[0] == 9 else 128
    fits = not any(dim % 16 for dim in dims) and (max(dims) <= largest or dims in ((192, 128), (256, 256)))
    return _head_reason(layer, f"multiples of 16 up to {largest}, 192 with 128, or 256", fits)


_LAYER_REASONS: dict[Family, Callable[[AttentionLayer, Capability], str | None]] = {
    Family.FA2: _fa2_or_fa3_reason,
    Family.FA3: _fa2_or_fa3_reason,
    Family.FA4: _fa4_reason,
    Family.TRITON: lambda layer, capability: layer_unsupported_reason(layer),
}
