"""The paged key/value cache: one pair of tensors a layer, blocks shared by number across layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from piecegraph.runner.attention.layer import AttentionLayer


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache. Token `t` of a block lies at `[block, t]`; slot = block * block_size + t."""

    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]


def allocate_kv_caches(
    layers: Sequence[AttentionLayer],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[str, KVCache]:
    """Caches by layer name. Their memory is not cleared: attention reads only what it wrote.

    `empty`: where tensors come from, called as `torch.empty` is; the first dimension is `num_blocks`.
    """

    def tensor(layer: AttentionLayer, head_dim: int) -> torch.Tensor:
        shape = (num_blocks, block_size, layer.num_kv_heads, head_dim)
        return empty(shape, dtype=layer.dtype, device=device)

    return {layer.name: KVCache(tensor(layer, layer.key_dim), tensor(layer, layer.value_dim)) for layer in layers}


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int) -> int:
    """What one block costs over all layers."""
    return block_size * sum(
        layer.num_kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize for layer in layers
    )
