"""The layers of a draft model in the cache: their names, their block table and their caches.

Note [the draft's keys lie beside the model's]: a layer of the draft has a cache tensor of its own with as many blocks
as the pool, and is found by a block table of the model's, that of a group of layers which keeps all tokens. So a block
number stands for the same tokens in the model and in the draft: a prefix is found for both, a request that gives way
gives up both, and the draft takes no block. Only a model none of whose groups keeps all tokens gets one more group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piecegraph.runner.attention.interface.cache_spec import CachedLayer, CacheSpec
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.kv_cache.groups import KVCacheLayout
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup

PREFIX = "draft "
"""What precedes a draft's layer's name in the cache, since the layers of two models may have the same names."""


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A layer of the draft, as the cache knows it."""

    name: str
    cache_spec: CacheSpec

    @classmethod
    def of(cls, layer: CachedLayer) -> DraftLayer:
        """Return the layer under a name that no layer of the model has."""
        return cls(PREFIX + layer.name, layer.cache_spec)


class DraftCaches(Mapping[str, KVCache]):
    """The draft's layers' caches among all caches, by the names that the draft's own graph has."""

    def __init__(self, caches: Mapping[str, KVCache]) -> None:
        """Keep `caches`, whose tensors may be replaced later."""
        self._caches = caches

    def __getitem__(self, name: str) -> KVCache:
        return self._caches[PREFIX + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(PREFIX) for name in self._caches if name.startswith(PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_draft_layers(layout: KVCacheLayout, layers: Sequence[CachedLayer]) -> tuple[KVCacheLayout, int]:
    """Return the layout with tensors for the draft's `layers`, and the group whose block tables they use.

    See Note [the draft's keys lie beside the model's].
    """
    group = next((number for number, one in enumerate(layout.groups) if one.keeps_all_tokens), len(layout.groups))
    if group == len(layout.groups):
        layout = replace(layout, groups=(*layout.groups, KVCacheGroup()), reaches=(*layout.reaches, frozenset()))
    names = [DraftLayer.of(layer).name for layer in layers]
    layout = replace(layout, group_of={**layout.group_of, **dict.fromkeys(names, group)})
    if layout.page_bytes is not None:  # the model's layers share pages of one size, and the draft's need not fit them
        return replace(layout, beside=tuple(names)), group
    return replace(layout, tensors=(*layout.tensors, *((name,) for name in names))), group
