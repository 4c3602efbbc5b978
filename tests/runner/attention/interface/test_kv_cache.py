"""The cache's tensors: whose they are, what a block costs, and blocks as kernels see them."""

from __future__ import annotations

from dataclasses import replace

import torch

from piecegraph.runner.attention.interface.kv_cache import allocate_kv_caches, as_pages, bytes_per_block
from piecegraph.runner.attention.interface.layer import AttentionLayer

CPU = torch.device("cpu")
LAYERS = [
    AttentionLayer(
        name=name, num_q_heads=4, num_kv_heads=2, key_dim=8, value_dim=16, dtype=torch.float16, scale=1.0, window=0,
        softcap=0.0, has_sinks=False,
    )
    for name in "abc"
]  # fmt: skip


def test_each_layer_has_its_own() -> None:
    caches = allocate_kv_caches(LAYERS, 5, 4, CPU)
    assert caches["b"].key.shape == (5, 4, 2, 8) and caches["b"].value.shape == (5, 4, 2, 16)
    assert len({cache.key.data_ptr() for cache in caches.values()}) == 3
    assert bytes_per_block(LAYERS, 4) * 5 == sum(c.key.nbytes + c.value.nbytes for c in caches.values())


def test_layers_of_several_groups_share() -> None:
    tensors = (("a", "c"), ("b",))
    caches = allocate_kv_caches(LAYERS, 5, 4, CPU, tensors=tensors)
    assert sorted(caches) == ["a", "b", "c"]
    assert caches["a"].key is caches["c"].key and caches["a"].value is caches["c"].value
    assert caches["a"].key.data_ptr() != caches["b"].key.data_ptr()
    assert bytes_per_block(LAYERS, 4, tensors) == 2 * bytes_per_block(LAYERS[:1], 4)


def test_layers_may_differ_unless_they_share() -> None:
    layers = [LAYERS[0], replace(LAYERS[1], key_dim=32)]
    caches = allocate_kv_caches(layers, 1, 4, CPU)
    assert caches["b"].key.shape == (1, 4, 2, 32)
    assert bytes_per_block(layers, 1) == 2 * 2 * (8 + 16 + 32 + 16)


def test_a_block_as_several_pages() -> None:
    """Block `b` is pages 2b and 2b + 1, in the same memory."""
    caches = allocate_kv_caches(LAYERS, 5, 4, CPU)
    paged = as_pages(caches, 2)
    assert paged["a"].key.shape == (10, 2, 2, 8)
    caches["a"].key[3] = torch.arange(4).view(4, 1, 1).half()
    assert paged["a"].key[6:8, :, 0, 0].tolist() == [[0, 1], [2, 3]]
    assert as_pages(caches, 1) is caches
