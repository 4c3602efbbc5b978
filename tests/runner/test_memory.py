"""The cache gets what it can use; too little is an error with the arithmetic in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner import memory
from piecegraph.runner.kv_cache import allocate_kv_caches, bytes_per_block
from piecegraph.runner.memory import cpu_budget_bytes, pick_num_blocks
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
def test_blocks(budget_blocks: int, num_kv_blocks: int | None, expected: int) -> None:
    """As many as fit, at most what all requests at full length take; a given number is taken as it is."""
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


def test_the_cpus_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enough, more only for one long request, never more than a share of what is free."""
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
