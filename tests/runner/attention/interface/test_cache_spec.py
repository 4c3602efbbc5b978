"""What layers keep, and the pages that layers of several kinds share."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.attention.interface.cache_spec import CacheSpec, CacheTensor, common_page_bytes
from piecegraph.runner.attention.interface.kv_cache import KVCache, StateCache, allocate_pages, bytes_per_block
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.kv_cache.groups import fitting_block_size, kv_cache_layout
from piecegraph.runner.scheduling.kv_cache_group import CacheKind, KVCacheGroup
from piecegraph.runner.state_layers.layer import StateLayer

STATE = StateLayer(
    name="state",
    op="piecegraph::linear_attention",
    states=(
        CacheTensor(name="conv", shape=(6, 3), dtype=torch.float16),
        CacheTensor(name="recurrent", shape=(2, 4, 8), dtype=torch.float32),
    ),
)
ATTENTION = AttentionLayer(
    name="attention", num_q_heads=4, num_kv_heads=2, key_dim=8, value_dim=16, dtype=torch.float16, scale=1.0, window=0,
    softcap=0.0, has_sinks=False,
)  # fmt: skip


def test_a_layer_says_what_it_keeps() -> None:
    assert ATTENTION.cache_spec.kind is CacheKind.FULL and ATTENTION.cache_spec.group() == KVCacheGroup()
    assert ATTENTION.cache_spec.page_bytes(4) == 4 * 2 * (8 + 16) * 2
    assert STATE.cache_spec.group() == KVCacheGroup(is_state=True)
    assert STATE.cache_spec.page_bytes(4) == STATE.cache_spec.page_bytes(400) == 256 + 256  # at aligned addresses


def test_a_spec_is_of_one_kind() -> None:
    with pytest.raises(AssertionError, match="a window of 0"):
        CacheSpec(kind=CacheKind.SLIDING, tensors=())
    assert CacheSpec(kind=CacheKind.CHUNKED, tensors=(), chunk_size=8).group() == KVCacheGroup(chunk_size=8)


@pytest.mark.parametrize(("block_size", "kernel_block_size"), [(4, 4), (8, 4), (64, 16)])
def test_pages_of_all_kinds_have_one_size(block_size: int, kernel_block_size: int) -> None:
    """A page of tokens is several of the kernels'; each block of either kind fits, and begins where the block does.
    The cache of one block, over which kernels are compiled ahead, has the strides of a larger one."""
    layers = (ATTENTION, STATE)
    layout = kv_cache_layout(layers, max_model_len=64, block_size=block_size, kernel_block_size=kernel_block_size)
    assert layout.tensors == (("attention", "state"),) and layout.page_bytes is not None
    assert layout.page_bytes == common_page_bytes([each.cache_spec for each in layers], block_size, kernel_block_size)
    assert bytes_per_block(layers, block_size, layout.tensors, layout.page_bytes) == layout.page_bytes
    caches = allocate_pages(
        layers, 3, block_size, torch.device("cpu"), tensors=layout.tensors, page_bytes=layout.page_bytes,
        kernel_block_size=kernel_block_size, empty=torch.zeros,
    )  # fmt: skip
    one_block = allocate_pages(
        layers, 1, block_size, torch.device("cpu"), tensors=layout.tensors, page_bytes=layout.page_bytes,
        kernel_block_size=kernel_block_size,
    )  # fmt: skip
    for name, cache in caches.items():  # kernels are compiled for these strides
        assert [each.stride() for each in one_block[name].tensors] == [each.stride() for each in cache.tensors]
    tokens, states = caches["attention"], caches["state"]
    assert isinstance(tokens, KVCache) and isinstance(states, StateCache)
    pages = block_size // kernel_block_size
    assert tokens.key.shape == (3 * pages, kernel_block_size, 2, 8)
    assert [tuple(each.shape) for each in states.tensors] == [(3, 6, 3), (3, 2, 4, 8)]
    for tensor in states.tensors:
        tensor[1] = 1
    tokens.key[:pages] = tokens.value[:pages] = 2
    tokens.key[2 * pages :] = tokens.value[2 * pages :] = 2
    assert all(bool((tensor[1] == 1).all()) for tensor in states.tensors)  # other blocks are other memory
    assert tokens.first_blocks(2, 3).key.shape[0] == 2 * pages and len(states.first_blocks(2, 3).tensors[0]) == 2


def test_blocks_hold_as_much_as_a_state() -> None:
    """A block size that nobody gave grows until a page of tokens is as large as a state."""
    assert ATTENTION.cache_spec.page_bytes(4) < STATE.cache_spec.page_bytes(4) <= ATTENTION.cache_spec.page_bytes(8)
    assert fitting_block_size((ATTENTION, STATE), 2) == 8
    assert fitting_block_size((ATTENTION, STATE), 16) == 16
    assert fitting_block_size((ATTENTION,), 2) == fitting_block_size((STATE,), 2) == 2
