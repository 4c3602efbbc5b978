"""The draft's layers use a block table of the model's, and only where none keeps all tokens one of their own."""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.cache_spec import CacheSpec, CacheTensor
from piecegraph.runner.attention.interface.kv_cache import KVCache, bytes_per_block
from piecegraph.runner.kv_cache.groups import KVCacheLayout, kv_cache_layout
from piecegraph.runner.scheduling.kv_cache_group import CacheKind, KVCacheGroup
from piecegraph.runner.speculative.draft_layers import DraftCaches, DraftLayer, with_draft_layers


def layer(name: str, window: int = 0) -> DraftLayer:
    tensors = tuple(CacheTensor(name=kind, shape=(2, 8), dtype=torch.float32) for kind in ("key", "value"))
    return DraftLayer(
        name, CacheSpec(kind=CacheKind.SLIDING if window else CacheKind.FULL, tensors=tensors, window=window)
    )


def layout(*layers: DraftLayer) -> KVCacheLayout:
    return kv_cache_layout(layers, max_model_len=256, block_size=4)


def test_layers_of_equal_names_share_blocks_and_no_tensor() -> None:
    found, group = with_draft_layers(layout(layer("layers.0"), layer("layers.1")), [layer("layers.0")])
    assert group == 0 and len(found.groups) == 1
    assert found.tensors == (("layers.0",), ("layers.1",), ("draft layers.0",))
    assert found.group_of == {"layers.0": 0, "layers.1": 0, "draft layers.0": 0}


def test_the_group_without_a_window_is_chosen() -> None:
    mixed = layout(layer("a", 8), layer("b"), layer("c", 8), layer("d"))
    found, group = with_draft_layers(mixed, [layer("a")])
    assert found.groups == mixed.groups and len(found.groups) > 1
    assert found.groups[group].keeps_all_tokens


def test_a_model_of_windows_alone_gets_a_group_more() -> None:
    windows = layout(layer("a", 8), layer("b", 8))
    assert not any(one.keeps_all_tokens for one in windows.groups)
    found, group = with_draft_layers(windows, [layer("a"), layer("b", 4)])
    assert group == len(windows.groups) and found.groups[group] == KVCacheGroup()


def test_a_model_with_states_keeps_the_draft_s_layers_beside_its_pages() -> None:
    """A page need not hold a page of the draft, and a block takes the bytes of both."""
    kept = CacheSpec(kind=CacheKind.STATE, tensors=(CacheTensor(name="state", shape=(100,), dtype=torch.float32),))
    layers = [DraftLayer("a", kept), layer("b")]
    mixed, draft = layout(*layers), [layer("a"), layer("c")]
    found, group = with_draft_layers(mixed, draft)
    assert found.groups[group].keeps_all_tokens and found.tensors == mixed.tensors
    assert found.beside == ("draft a", "draft c")
    every = [*layers, *map(DraftLayer.of, draft)]
    of_draft = sum(each.cache_spec.page_bytes(4) for each in draft)
    assert mixed.page_bytes is not None
    of_model = mixed.page_bytes * len(mixed.tensors)
    assert bytes_per_block(every, 4, found.tensors, found.page_bytes, found.beside) == of_model + of_draft
    assert bytes_per_block(layers, 4, mixed.tensors, mixed.page_bytes) == of_model


def test_caches_have_the_names_of_the_drafts_own_graph() -> None:
    def cache() -> KVCache:
        return KVCache(torch.zeros(1), torch.zeros(1))

    all_caches = {"a": cache(), "draft a": cache(), "draft b": cache()}
    found = DraftCaches(all_caches)
    assert list(found) == ["a", "b"] and len(found) == 2
    assert found["a"] is all_caches["draft a"]
    all_caches["draft a"] = cache()
    assert found["a"] is all_caches["draft a"], "tensors are replaced once the cache has its size"
