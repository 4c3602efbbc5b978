"""What one layer keeps in the cache: the kind of the cache, and the tensors of a token or of a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from piecegraph.runner.scheduling.kv_cache_group import CacheKind, KVCacheGroup

ALIGNMENT = 256
"""The boundary in bytes at which each page begins, and each tensor of a state."""


class Reach(NamedTuple):
    """How far back the queries of a layer see."""

    window: int = 0  # keys a query sees, itself included; 0: all before it
    chunk_size: int = 0  # tokens of a chunk, of which a query sees its own; 0: no chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One tensor of a layer's cache, without the dimensions that count blocks and tokens."""

    name: str  # e.g. "key", "conv"
    shape: tuple[int, ...]  # of one token; in a cache of states, of one state
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of one token, or of one state."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What one layer keeps.

    A block of the cache is a page of each layer of a group: `block_size` tokens, or one state. Layers whose specs have
    one `group` may share block tables; layers of one group and different specs have pages of different sizes.
    """

    kind: CacheKind
    tensors: tuple[CacheTensor, ...]
    window: int = 0  # tokens of a SLIDING layer, the token itself included
    chunk_size: int = 0  # tokens of a chunk of a CHUNKED layer
    values_in_keys: int | None = None  # the first numbers of a key that are the value; None: values are kept apart
    rollback: int = 0  # tokens by which a STATE can be taken back; see `recent_states`

    def __post_init__(self) -> None:
        assert bool(self.window) is (self.kind is CacheKind.SLIDING), f"a window of {self.window}, {self.kind}"
        assert bool(self.chunk_size) is (self.kind is CacheKind.CHUNKED), f"chunks of {self.chunk_size}, {self.kind}"
        assert not self.rollback or self.kind is CacheKind.STATE, f"a rollback of {self.rollback}, {self.kind}"

    @property
    def reach(self) -> Reach:
        """How far back queries see."""
        return Reach(self.window, self.chunk_size)

    @property
    def is_state(self) -> bool:
        """True if a block is one state, whatever the block size."""
        return self.kind is CacheKind.STATE

    def group(self, *, keeps_boundaries: bool = True) -> KVCacheGroup:
        """Return the group of such layers for the scheduler, without layers. `keeps_boundaries`: see `KVCacheGroup`."""
        return KVCacheGroup(
            sliding_window=self.window or None,
            chunk_size=self.chunk_size or None,
            is_state=self.is_state,
            is_latent=self.kind is CacheKind.LATENT,
            keeps_boundaries=keeps_boundaries or not self.is_state,
        )

    def page_bytes(self, block_size: int) -> int:
        """Return the bytes of a page with its tensors one after the other, those of a state at aligned addresses."""
        if self.is_state:
            return sum(_aligned(tensor.num_bytes) for tensor in self.tensors)
        return block_size * sum(tensor.num_bytes for tensor in self.tensors)

    def parts(self, block_size: int) -> Iterator[tuple[CacheTensor, int, tuple[int, ...]]]:
        """Yield each tensor with the byte at which it begins in a page, and its shape there."""
        at = 0
        for tensor in self.tensors:
            yield tensor, at, tensor.shape if self.is_state else (block_size, *tensor.shape)
            at += _aligned(tensor.num_bytes) if self.is_state else block_size * tensor.num_bytes


class CachedLayer(Protocol):
    """A layer that keeps something in the cache."""

    @property
    def name(self) -> str:
        """The module's name in the model."""

    @property
    def cache_spec(self) -> CacheSpec:
        """Return what the layer keeps."""


def common_page_bytes(specs: Iterable[CacheSpec], block_size: int, kernel_block_size: int) -> int:
    """Return the bytes of a page that holds a page of any of `specs`.

    Kernels see a page of tokens as several pages of `kernel_block_size` tokens, each of which begins at an aligned
    address; a state takes the whole page.
    """
    pages = block_size // kernel_block_size
    needed = max(
        -(-spec.page_bytes(block_size) // pages) if spec.is_state else spec.page_bytes(kernel_block_size)
        for spec in specs
    )
    return pages * _aligned(needed)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
