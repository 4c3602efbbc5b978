"""The paged cache: tensors that are divided into equal, numbered blocks.

The tensors belong to one layer, or are shared by one layer of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.attention.interface.cache_spec import CachedLayer, CacheSpec


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of the numbers in a layer's cache, one for each KV head, in tensors that keep their addresses.

    A key or value is divided by its scale before it is rounded to e4m3, and what is read is multiplied by it. Where
    values are part of keys, both are one tensor.

    Note [keys less a constant]: before that, `key_shift` of its head is subtracted from a key, and nothing adds it
    again. A query's scores of all keys of a head change by the same number, which softmax takes no notice of, so that
    only writers know of it. This holds for every key of a head or for none, and neither for capped scores nor beside
    the score of a sink (`unshiftable_reason`), nor where values are part of keys.
    """

    key: torch.Tensor  # [num_kv_heads] float32, above 0
    value: torch.Tensor  # the same
    key_shift: torch.Tensor | None = None  # [num_kv_heads, key_dim] float32; None: keys are not shifted

    @classmethod
    def ones(cls, spec: CacheSpec, device: torch.device) -> KVScales:
        """Return the scales of a layer that keeps numbers as they are."""
        made = [torch.ones(tensor.shape[0], dtype=torch.float32, device=device) for tensor in spec.tensors]
        if spec.values_in_keys is not None:
            return cls(made[0], made[0])
        return cls(made[0], made[1], torch.zeros(spec.tensors[0].shape, dtype=torch.float32, device=device))

    def copy_(self, other: KVScales) -> None:
        """Write other scales, one or one for each KV head, and another shift of keys, in place; without one, zero."""
        self.key.copy_(other.key.expand_as(self.key))
        if self.value is not self.key:
            self.value.copy_(other.value.expand_as(self.value))
        if self.key_shift is not None:
            self.key_shift.copy_(torch.zeros(()) if other.key_shift is None else other.key_shift)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that writers and readers of the cache take, by what they are."""
        found = {"scales of keys": self.key, "scales of values": self.value, "shift of keys": self.key_shift}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class KVCache:
    """The cache of one layer. Token `t` of a block lies at `[block, t]`; its slot is block * block_size + t.

    The tokens of a block are adjacent. The blocks are, too, unless the tensor's memory is shared with states. With
    latent attention, values are the beginning of keys, in the same memory.
    """

    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]
    scales: KVScales | None = None  # None: numbers are kept as they are

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of keys and values."""
        return self.key, self.value

    def first_blocks(self, num_blocks: int, of: int) -> KVCache:
        """Return the first `num_blocks` of the `of` blocks that the tensors have; a block may be several pages."""
        key, value = (tensor[: num_blocks * (tensor.shape[0] // of)] for tensor in self.tensors)
        return KVCache(key, value, self.scales)


@dataclass(frozen=True, slots=True)
class StateCache:
    """The states of one layer, one a block, in the order of the tensors of its `CacheSpec`."""

    tensors: tuple[torch.Tensor, ...]  # [num_blocks, *shape] each

    def first_blocks(self, num_blocks: int, of: int) -> StateCache:
        """Return the first `num_blocks` of the `of` blocks that the tensors have."""
        return StateCache(tuple(tensor[:num_blocks] for tensor in self.tensors))


LayerCache = KVCache | StateCache


def split_caches(caches: Mapping[str, LayerCache]) -> tuple[dict[str, KVCache], dict[str, StateCache]]:
    """Return the caches of tokens and those of states."""
    return (
        {name: cache for name, cache in caches.items() if isinstance(cache, KVCache)},
        {name: cache for name, cache in caches.items() if isinstance(cache, StateCache)},
    )


def allocate_kv_caches(
    layers: Sequence[CachedLayer],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    tensors: Sequence[Sequence[str]] | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[str, KVCache]:
    """Allocate the caches, by layer name. Their memory is not cleared: attention reads only what it wrote.

    Args:
        layers: all layers, with keys and values; those that share a tensor have them of one shape and dtype.
        num_blocks: blocks of each tensor.
        block_size: tokens of a block.
        device: where the tensors lie.
        tensors: for each pair of tensors, the names of the layers that share it (`KVCacheLayout.tensors`); None: each
            layer has its own.
        empty: the allocator, called as `torch.empty` is; the first dimension is `num_blocks`.
    """
    by_name = {layer.name: layer for layer in layers}
    caches: dict[str, KVCache] = {}
    for names in [[name] for name in by_name] if tensors is None else tensors:
        spec = by_name[names[0]].cache_spec
        made = [
            empty((num_blocks, block_size, *tensor.shape), dtype=tensor.dtype, device=device) for tensor in spec.tensors
        ]
        caches |= {name: _of_tokens(spec, made) for name in names}
    return caches


def allocate_pages(
    layers: Sequence[CachedLayer],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    tensors: Sequence[Sequence[str]],
    page_bytes: int,
    kernel_block_size: int,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[str, LayerCache]:
    """Allocate the caches of layers of any specs, by layer name, in pages of `page_bytes` that they share.

    The arguments are those of `allocate_kv_caches`; `page_bytes` is `common_page_bytes` or more. Keys and values are
    returned in blocks of `kernel_block_size`, which is what kernels see, and a state in the block that holds it.
    """
    by_name = {layer.name: layer for layer in layers}
    caches: dict[str, LayerCache] = {}
    for names in tensors:
        memory = empty((num_blocks, page_bytes), dtype=torch.uint8, device=device)
        for name in names:
            caches[name] = _in_pages(memory, by_name[name].cache_spec, block_size, kernel_block_size)
    return caches


def _in_pages(memory: torch.Tensor, spec: CacheSpec, block_size: int, kernel_block_size: int) -> LayerCache:
    """Return a layer's cache as views of `memory`, `[num_blocks, page_bytes]` bytes."""
    if not spec.is_state:
        pages = block_size // kernel_block_size
        memory = memory.view(memory.shape[0] * pages, memory.shape[1] // pages)
    tensors = tuple(_part(memory, at, shape, tensor.dtype) for tensor, at, shape in spec.parts(kernel_block_size))
    if spec.is_state:
        return StateCache(tensors)
    return _of_tokens(spec, tensors)


def _part(memory: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes from `at` on of each page as `[num_pages, *shape]` of `dtype`.

    One page alone has the stride of several, where torch would choose that of packed pages: kernels are compiled for
    it, and those compiled over one block serve the final cache.
    """
    num_bytes = _num_bytes(shape, dtype)
    part: torch.Tensor = memory[:, at : at + num_bytes].view(dtype).unflatten(1, shape)
    strides = (memory.shape[1] // dtype.itemsize, *part.stride()[1:])
    return part.as_strided(part.shape, strides, part.storage_offset())


def _of_tokens(spec: CacheSpec, tensors: Sequence[torch.Tensor]) -> KVCache:
    """Return the cache of a layer that keeps tokens."""
    is_scaled = spec.tensors[0].dtype is torch.float8_e4m3fn
    scales = KVScales.ones(spec, tensors[0].device) if is_scaled else None
    if spec.values_in_keys is not None:
        (key,) = tensors
        return KVCache(key, key[..., : spec.values_in_keys], scales)
    key, value = tensors
    return KVCache(key, value, scales)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def bytes_per_block(
    layers: Sequence[CachedLayer],
    block_size: int,
    tensors: Sequence[Sequence[str]] | None = None,
    page_bytes: int | None = None,
    beside: Collection[str] = (),
) -> int:
    """Return the bytes of one block over all of the cache's tensors (`allocate_kv_caches`, or `allocate_pages`).

    `beside`: names of layers that have tensors of their own beside pages.
    """
    if page_bytes is not None:
        own = sum(layer.cache_spec.page_bytes(block_size) for layer in layers if layer.name in beside)
        return page_bytes * (len(layers) - len(beside) if tensors is None else len(tensors)) + own
    first = {layer.name for layer in layers} if tensors is None else {names[0] for names in tensors}
    return sum(layer.cache_spec.page_bytes(block_size) for layer in layers if layer.name in first)


def as_pages(caches: dict[str, KVCache], pages_per_block: int) -> Mapping[str, KVCache]:
    """Return the same memory with each block as `pages_per_block` smaller ones; `caches` itself if that is 1."""
    if pages_per_block == 1:
        return caches

    def pages(blocks: torch.Tensor) -> torch.Tensor:
        num_blocks, block_size, *head = blocks.shape
        return blocks.view(num_blocks * pages_per_block, block_size // pages_per_block, *head)

    return {name: KVCache(pages(cache.key), pages(cache.value), cache.scales) for name, cache in caches.items()}
