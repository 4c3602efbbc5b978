"""The paged key/value cache: pairs of tensors that are divided into equal, numbered blocks.

A pair belongs to one layer, or is shared by one layer of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from piecegraph.runner.attention.interface.layer import AttentionLayer


@dataclass(frozen=True, slots=True)
class KVCache:
    """The cache of one layer. Token `t` of a block lies at `[block, t]`; its slot is block * block_size + t."""

    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]


def allocate_kv_caches(
    layers: Sequence[AttentionLayer],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    tensors: Sequence[Sequence[str]] | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[str, KVCache]:
    """Allocate the caches, by layer name. Their memory is not cleared: attention reads only what it wrote.

    Args:
        layers: all attention layers; those that share a tensor have keys and values of one shape and dtype.
        num_blocks: blocks of each tensor.
        block_size: tokens of a block.
        device: where the tensors lie.
        tensors: for each pair of tensors, the names of the layers that share it (`KVCacheLayout.tensors`); None: each
            layer has its own.
        empty: the allocator, called as `torch.empty` is; the first dimension is `num_blocks`.
    """

    def tensor(layer: AttentionLayer, head_dim: int) -> torch.Tensor:
        shape = (num_blocks, block_size, layer.num_kv_heads, head_dim)
        return empty(shape, dtype=layer.dtype, device=device)

    by_name = {layer.name: layer for layer in layers}
    caches: dict[str, KVCache] = {}
    for names in [[name] for name in by_name] if tensors is None else tensors:
        layer = by_name[names[0]]
        caches |= dict.fromkeys(names, KVCache(tensor(layer, layer.key_dim), tensor(layer, layer.value_dim)))
    return caches


def bytes_per_block(
    layers: Sequence[AttentionLayer], block_size: int, tensors: Sequence[Sequence[str]] | None = None
) -> int:
    """Return the bytes of one block over all of the cache's tensors (`allocate_kv_caches`)."""
    first = {layer.name for layer in layers} if tensors is None else {names[0] for names in tensors}
    return block_size * sum(
        layer.num_kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize
        for layer in layers
        if layer.name in first
    )


def as_pages(caches: dict[str, KVCache], pages_per_block: int) -> Mapping[str, KVCache]:
    """Return the same memory with each block as `pages_per_block` smaller ones; `caches` itself if that is 1."""
    if pages_per_block == 1:
        return caches

    def pages(blocks: torch.Tensor) -> torch.Tensor:
        num_blocks, block_size, *head = blocks.shape
        return blocks.view(num_blocks * pages_per_block, block_size // pages_per_block, *head)

    return {name: KVCache(pages(cache.key), pages(cache.value)) for name, cache in caches.items()}
