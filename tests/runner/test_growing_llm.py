"""An `LLM` whose cache is sized after its graphs: the whole way, over a device of a few bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import OutOfMemory
from piecegraph.progress import Phase
from piecegraph.runner.kv_cache.allocation import AllocateCaches, CacheAllocation, CacheSizes, reserve
from piecegraph.runner.kv_cache.budget import MemoryBudget
from piecegraph.runner.startup.memory import kv_caches
from tests.runner.fake_memory_driver import FakeMemoryDriver

TOTAL_BYTES, USED_BYTES = 4_000_000, 1_000_000
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["one", "two, which is longer", "three"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeMemoryDriver:
    """Let the next `LLM` on the CPU take its cache from this driver, as on a GPU."""
    driver = FakeMemoryDriver(TOTAL_BYTES, granularity=1024)

    def allocate(allocate: AllocateCaches, sizes: CacheSizes, device: torch.device, **given: object) -> CacheAllocation:
        budget = MemoryBudget(
            total_bytes=TOTAL_BYTES, utilization=0.5, other_bytes=0, model_bytes=USED_BYTES, step_bytes=0, graph_bytes=0
        )
        return reserve(allocate, sizes, budget, driver)

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return TOTAL_BYTES - USED_BYTES - driver.used_bytes, TOTAL_BYTES

    monkeypatch.setattr(kv_caches, "allocate_given", allocate)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return driver


def test_an_llm_over_a_growing_cache_answers_like_one_over_a_fixed_cache(
    llm: LLM, llama_dir: Path, driver: FakeMemoryDriver
) -> None:
    """The cache comes after the graphs, the scheduler has all of its blocks, and close gives all of it back."""
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    phases: list[Phase] = []
    with LLM(
        llama_dir, dtype="float32", compiler="eager", max_num_seqs=64, graph_kind="recorded",
        cudagraph_capture_sizes=(1, 4, 64), on_phase=phases.append,
    ) as growing:  # fmt: skip
        names = list(dict.fromkeys(phase.name for phase in phases))
        assert names[-3:] == ["capture", "kv_cache", "engine"]
        num_blocks = growing.engine.stats.num_blocks
        assert phases[-2].detail.startswith(f"{num_blocks} blocks of 16 tokens")
        caches = list(growing.runner.step.kv_caches.values())
        assert {len(layer.key) for layer in caches} == {len(layer.value) for layer in caches} == {num_blocks}
        left_over = int(0.5 * TOTAL_BYTES) - USED_BYTES - sum(layer.key.nbytes + layer.value.nbytes for layer in caches)
        assert 0 <= left_over < len(caches) * 2 * driver.granularity
        del caches  # they would keep the memory
        outputs = growing.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not driver.mapped and not driver.reserved


def test_too_little_memory_is_refused_and_freed(
    llama_dir: Path, driver: FakeMemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs took what one request needs: nothing of the cache is left behind."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, TOTAL_BYTES))
    with pytest.raises(OutOfMemory, match=r"one request of max_model_len=96: .* of graphs leaves -0\.00 GiB\."):
        LLM(llama_dir, dtype="float32", compiler="eager", graph_kind="recorded", cudagraph_capture_sizes=(1,))
    assert not driver.mapped and not driver.reserved
