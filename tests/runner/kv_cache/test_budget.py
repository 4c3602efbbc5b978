"""The cache gets what it can use; too little is an error with the arithmetic in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.attention.interface.kv_cache import allocate_kv_caches, bytes_per_block
from piecegraph.runner.kv_cache import budget as memory
from piecegraph.runner.kv_cache.budget import (
    MemoryBudget,
    cpu_budget_bytes,
    max_graph_bytes,
    pick_num_blocks,
    with_graphs,
)
from tests.runner.attention.paged_case import make_case

SIZES: dict[str, Any] = {
    "block_bytes": 1024,
    "block_size": 16,
    "blocks_per_request": 7,
    "max_model_len": 100,
    "max_num_seqs": 4,
}


@pytest.mark.parametrize(
    ("budget_blocks", "num_kv_blocks", "expected"), [(10, None, 10), (1000, None, 28), (0, 9, 9), (0, 500, 500)]
)
def test_the_number_of_blocks_follows_the_budget(budget_blocks: int, num_kv_blocks: int | None, expected: int) -> None:
    """As many blocks as fit are used, at most what all requests of full length need, or the given number."""
    assert pick_num_blocks(budget_bytes=budget_blocks * 1024, num_kv_blocks=num_kv_blocks, **SIZES) == expected


def test_too_little_memory() -> None:
    message = (
        r"too small for one request of max_model_len=100: that takes 7 blocks of 16 tokens at 1\.0 KiB, 0\.0 MiB, "
        r"and 0\.0 MiB for the cache hold 6\. Lower max_model_len to at most 96, or give more memory"
    )
    with pytest.raises(OutOfMemory, match=message):
        pick_num_blocks(budget_bytes=6 * 1024, **SIZES)


def test_too_few_blocks() -> None:
    with pytest.raises(OutOfMemory, match=r"and num_kv_blocks=3\. Lower max_model_len to at most 48"):
        pick_num_blocks(budget_bytes=0, num_kv_blocks=3, **SIZES)


def test_no_memory_at_all() -> None:
    with pytest.raises(OutOfMemory, match=r"hold 0\. Give more memory"):
        pick_num_blocks(budget_bytes=-5, **SIZES)


BUDGET = MemoryBudget(
    total_bytes=100 * 2**30,
    utilization=0.9,
    other_bytes=2 * 2**30,
    model_bytes=30 * 2**30,
    step_bytes=5 * 2**30,
    graph_bytes=0,
)


def test_each_byte_is_counted_once() -> None:
    assert BUDGET.cache_bytes == 53 * 2**30
    for name in ("other_bytes", "model_bytes", "step_bytes", "graph_bytes"):
        more = replace(BUDGET, **{name: getattr(BUDGET, name) + 7})
        assert more.cache_bytes == BUDGET.cache_bytes - 7, name


def test_graphs_take_their_place_in_the_budget() -> None:
    """The terms add up to the memory in use after capture, and the peak of a step comes on top."""
    used_bytes = 36 * 2**30
    budget = with_graphs(BUDGET, used_bytes=used_bytes, graph_bytes=3 * 2**30)
    assert (budget.graph_bytes, budget.model_bytes, budget.step_bytes) == (3 * 2**30, 30 * 2**30, 5 * 2**30)
    assert budget.other_bytes == 3 * 2**30  # 1 GiB more than before the capture, and it is not the graphs'
    assert used_bytes + budget.step_bytes + budget.cache_bytes == 90 * 2**30


def test_the_budget_shows_its_arithmetic() -> None:
    assert str(replace(BUDGET, graph_bytes=2**29)) == (
        "gpu_memory_utilization=0.9 of 100.00 GiB is 90.00 GiB; less 2.00 GiB used outside of torch, 30.00 GiB of "
        "weights and buffers, 5.00 GiB for the largest step and 0.50 GiB of graphs leaves 52.50 GiB"
    )
    with pytest.raises(
        OutOfMemory, match=r"gpu_memory_utilization\)\. gpu_memory_utilization=0\.9 of .* 53\.00 GiB\.$"
    ):
        pick_num_blocks(budget_bytes=0, budget=BUDGET, **SIZES)


@pytest.mark.parametrize(
    ("cache_bytes", "request_bytes", "expected"),
    [(100, 10, 50), (100, 50, 50), (100, 70, 30), (100, 200, 0), (-5, 1, 0)],
)
def test_graphs_may_take_half_and_leave_one_request(cache_bytes: int, request_bytes: int, expected: int) -> None:
    """The limit is half of the shared memory, and leaves the memory of one request."""
    assert max_graph_bytes(cache_bytes, request_bytes) == expected


def test_a_request_that_holds_less_than_its_tokens() -> None:
    """With windows the message suggests no max_model_len, because the right value is unknown."""
    sizes = SIZES | {"blocks_per_request": 4}
    assert pick_num_blocks(budget_bytes=1000 * 1024, **sizes) == 16
    with pytest.raises(OutOfMemory, match=r"that takes 4 blocks .* hold 3\. Give more memory"):
        pick_num_blocks(budget_bytes=3 * 1024, **sizes)


def test_the_cpus_cache_is_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has a default size, more only for one long request, and never more than a share of the free memory."""
    monkeypatch.setattr(memory, "_container_free_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr(memory, "_machine_free_bytes", lambda: 20 * 2**30)
    assert cpu_budget_bytes(2**30) == 4 * 2**30
    assert cpu_budget_bytes(6 * 2**30) == 6 * 2**30
    assert cpu_budget_bytes(60 * 2**30) == 8 * 2**30


def test_a_block_costs_what_is_allocated() -> None:
    layer = make_case(lens=[(0, 1)], value_dim=5, dtype=torch.float16).layer
    (cache,) = allocate_kv_caches([layer], 10, 16, torch.device("cpu")).values()
    assert cache.key.nbytes + cache.value.nbytes == 10 * bytes_per_block([layer], 16)
    assert (cache.key.shape, cache.value.shape) == ((10, 16, 2, 8), (10, 16, 2, 5))
