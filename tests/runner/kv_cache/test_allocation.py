"""A cache is sized once all else is there, and its tensors stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.attention.interface.kv_cache import KVCache, allocate_kv_caches, as_pages, bytes_per_block
from piecegraph.runner.kv_cache import allocation as cache_allocation
from piecegraph.runner.kv_cache.allocation import CacheSizes, allocate_given, allocate_on_gpu, reserve
from piecegraph.runner.kv_cache.budget import MemoryBudget
from tests.runner.attention.paged_case import make_case
from tests.runner.fake_memory_driver import FakeMemoryDriver

CPU = torch.device("cpu")
BLOCK_SIZE = 4
LAYER = make_case(lens=[(0, 1)], dtype=torch.bfloat16).layer  # 2 heads of 8, 128 bytes a block of keys
LAYERS = [LAYER, replace(LAYER, name="other", value_dim=4)]
ALLOCATE = partial(allocate_kv_caches, LAYERS, block_size=BLOCK_SIZE, device=CPU)
SIZES = CacheSizes(
    block_size=BLOCK_SIZE,
    block_bytes=bytes_per_block(LAYERS, BLOCK_SIZE),  # 128 + 128 + 128 + 64
    blocks_per_request=5,
    max_model_len=20,
    max_num_seqs=30,
)
BUDGET = MemoryBudget(
    total_bytes=100_000, utilization=0.9, other_bytes=10_000, model_bytes=20_000, step_bytes=15_000, graph_bytes=0
)


def test_memory_of_graphs_is_not_given_to_the_cache() -> None:
    """Addresses for all that is left without graphs, memory for what is left with them."""
    driver = FakeMemoryDriver(100_000)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    assert cache.is_growing and cache.num_blocks == 45_000 // 448
    assert cache.max_graph_bytes == 22_500
    before = {name: (layer.key.data_ptr(), layer.value.data_ptr()) for name, layer in cache.kv_caches.items()}
    tensors = dict(cache.kv_caches)
    for layer in tensors.values():
        layer.key[0], layer.value[0] = 5, 6
    used_by_others = 10_000 + 20_000 + 8_000
    assert driver.used_bytes == 128 * 3 + 64
    num_blocks = cache.fill(used_by_others + driver.used_bytes, 8_000)
    assert num_blocks == 37_000 // 448 == cache.num_blocks
    assert 37_000 - 448 < driver.used_bytes <= 37_000
    assert not cache.is_growing
    for name, layer in cache.kv_caches.items():
        assert layer.key.shape == (num_blocks, 4, 2, 8) and layer.key.dtype == torch.bfloat16
        assert layer.value.shape == (num_blocks, 4, 2, 8 if name == "layer" else 4)
        assert (layer.key.data_ptr(), layer.value.data_ptr()) == before[name]
        assert (layer.key.stride(), layer.value.stride()) == (tensors[name].key.stride(), tensors[name].value.stride())
        assert layer.key[0].unique().item() == 5 and layer.value[0].unique().item() == 6
    assert cache.budget is not None and cache.budget.cache_bytes == 37_000
    assert cache.budget.graph_bytes == 8_000 and cache.budget.other_bytes == 10_000


def test_a_block_may_be_several_of_the_kernels() -> None:
    """Layers may share tensors, too: all of a tensor has memory, whatever its first dimension counts."""

    def allocate(num_blocks: int, *, empty: Callable[..., torch.Tensor]) -> dict[str, KVCache]:
        layers = [LAYER, replace(LAYER, name="other")]
        caches = allocate_kv_caches(layers, num_blocks, BLOCK_SIZE, CPU, tensors=[["layer", "other"]], empty=empty)
        return dict(as_pages(caches, 2))

    driver = FakeMemoryDriver(100_000)
    cache = reserve(allocate, replace(SIZES, block_bytes=256), BUDGET, driver)
    num_blocks = cache.fill(30_000 + driver.used_bytes, 0)
    assert num_blocks == 150  # of requests, at most
    for layer in cache.kv_caches.values():
        assert layer.key.shape == layer.value.shape == (2 * num_blocks, BLOCK_SIZE // 2, 2, 8)
    assert driver.used_bytes == 150 * 256
    assert cache.kv_caches["layer"].key.data_ptr() == cache.kv_caches["other"].key.data_ptr()


def test_memory_taken_by_other_processes_is_not_given_to_the_cache() -> None:
    driver = FakeMemoryDriver(100_000)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    assert cache.fill(30_000 + 6_000 + driver.used_bytes, 0) == 39_000 // 448
    assert cache.budget is not None and cache.budget.other_bytes == 16_000


def test_a_cache_is_filled_once() -> None:
    driver = FakeMemoryDriver(100_000)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    num_blocks, text = cache.fill(30_000 + driver.used_bytes, 0), str(cache)
    driver.calls.clear()
    assert cache.fill(90_000, 50_000) == num_blocks
    assert not driver.calls and str(cache) == text


def test_a_cache_takes_no_more_than_all_requests_need() -> None:
    driver = FakeMemoryDriver(100_000)
    sizes = replace(SIZES, max_num_seqs=3)
    cache = reserve(ALLOCATE, sizes, BUDGET, driver)
    assert cache.fill(30_000 + driver.used_bytes, 0) == 15
    assert driver.used_bytes == 15 * 448


def test_rounding_reduces_the_number_of_blocks() -> None:
    """Memory in multiples of the granularity must be within the budget, and must hold one request."""
    driver = FakeMemoryDriver(100_000, granularity=1024)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    assert cache.fill(30_000 + 30_000 + driver.used_bytes, 30_000) == 32  # 3 x 4096 + 2048 bytes of 15,000
    assert driver.used_bytes == 14_336
    driver = FakeMemoryDriver(100_000, granularity=16_384)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    with pytest.raises(OutOfMemory, match=r"takes 5 blocks .* hold 0\. Give more memory"):
        cache.fill(30_000 + 30_000 + driver.used_bytes, 30_000)


def test_too_little_before_the_graphs() -> None:
    """Refused before anything is reserved, with every term."""
    driver = FakeMemoryDriver(100_000)
    scale = 2**30 // 100
    budget = MemoryBudget(
        total_bytes=80 * 2**30, utilization=0.5, other_bytes=2**29, model_bytes=39 * 2**30 + 26 * scale,
        step_bytes=24 * scale, graph_bytes=0,
    )  # fmt: skip
    message = (
        r"one request of max_model_len=20: that takes 5 blocks .* hold 0\. .*gpu_memory_utilization=0\.5 of 80\.00 GiB "
        r"is 40\.00 GiB; less 0\.50 GiB used outside of torch, 39\.26 GiB of weights and buffers, 0\.24 GiB for the "
        r"largest step and 0\.00 GiB of graphs leaves 0\.00 GiB\."
    )
    with pytest.raises(OutOfMemory, match=message):
        reserve(ALLOCATE, SIZES, budget, driver)
    assert not driver.calls


def test_too_little_after_the_graphs() -> None:
    driver = FakeMemoryDriver(100_000)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    with pytest.raises(OutOfMemory, match=r"hold 4\. Lower max_model_len to at most 16.* of graphs leaves 0\.00 GiB"):
        cache.fill(30_000 + 43_000 + driver.used_bytes, 43_000)
    assert driver.used_bytes == 448


def test_running_out_while_filling_is_out_of_memory() -> None:
    """The budget was right when it was made; the memory mapped first is kept until the cache is freed."""
    driver = FakeMemoryDriver(20_000)
    cache = reserve(ALLOCATE, SIZES, BUDGET, driver)
    with pytest.raises(OutOfMemory, match=r"Another process may have taken .* of graphs leaves 0\.00 GiB\."):
        cache.fill(30_000 + driver.used_bytes, 0)
    assert driver.used_bytes == 448
    driver = FakeMemoryDriver(300)
    with pytest.raises(OutOfMemory, match=r"Another process may have taken .* of graphs leaves 0\.00 GiB\."):
        reserve(ALLOCATE, SIZES, BUDGET, driver)
    assert not driver.reserved and not driver.used_bytes


@pytest.mark.parametrize(
    ("num_kv_blocks", "kv_cache_memory_bytes", "expected"), [(7, None, 7), (None, 6 * 448 + 447, 6), (9, 6 * 448, 9)]
)
def test_a_given_size_is_used(num_kv_blocks: int | None, kv_cache_memory_bytes: int | None, expected: int) -> None:
    cache = allocate_given(
        ALLOCATE, SIZES, CPU, num_kv_blocks=num_kv_blocks, kv_cache_memory_bytes=kv_cache_memory_bytes, has_graphs=True
    )
    assert not cache.is_growing and cache.max_graph_bytes is None  # no GPU, no limit
    assert cache.fill(0, 0) == cache.num_blocks == expected
    assert all(layer.key.shape[0] == layer.value.shape[0] == expected for layer in cache.kv_caches.values())
    assert str(cache) == f"{expected} blocks of 4 tokens, 0 MiB"


def test_a_failed_allocation_is_out_of_memory() -> None:
    def allocate(num_blocks: int) -> dict[str, KVCache]:
        raise torch.OutOfMemoryError("tried to allocate")

    message = r"a key/value cache of 5000 blocks takes 2\.1 MiB, more than cpu has left \(tried to allocate\)\. Lower"
    with pytest.raises(OutOfMemory, match=message):
        allocate_given(allocate, SIZES, CPU, num_kv_blocks=5000, kv_cache_memory_bytes=None, has_graphs=False)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_without_virtual_memory_graphs_have_a_reserve(monkeypatch: pytest.MonkeyPatch, has_graphs: bool) -> None:
    """The cache is allocated at once, and a fixed reserve limits the memory of `capture`."""
    measured: list[tuple[int, int]] = []

    def gpu_budget(device: torch.device, utilization: float, *, step_bytes: int, graph_bytes: int) -> MemoryBudget:
        measured.append((step_bytes, graph_bytes))
        return replace(BUDGET, utilization=utilization, step_bytes=step_bytes, graph_bytes=graph_bytes)

    monkeypatch.setattr(cache_allocation, "gpu_budget", gpu_budget)
    monkeypatch.setattr(cache_allocation, "graph_budget_bytes", lambda device: 5_000)
    cache = allocate_on_gpu(ALLOCATE, SIZES, CPU, gpu_memory_utilization=0.8, step_bytes=9_000, has_graphs=has_graphs)
    graph_bytes = 5_000 if has_graphs else 0
    assert measured == [(9_000, graph_bytes)]
    assert cache.max_graph_bytes == (graph_bytes or None)
    assert cache.fill(0, 0) == (80_000 - 30_000 - 9_000 - graph_bytes) // 448
    assert "0.00 GiB of graphs leaves 0.00 GiB" in str(cache)
