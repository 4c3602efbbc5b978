"""What the largest step takes is measured once, and found by the next start of the same model and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.cache.entry import Entry
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.progress import Phase
from piecegraph.runner import step_memory
from piecegraph.runner.step_memory import KeptStepMemory, StepMemory, kept_or_measured, step_factors
from tests.compiler.stored.kernel_caches import OF, cache_in
from tests.runner.tiny_models import llama_config, random_model, save

MEASURED = StepMemory(peak_bytes=600 * 2**20, stays_bytes=32 * 2**20)
SIZES = {"max_num_tokens": 8192, "max_model_len": 4096}
CPU = torch.device("cpu")


def kept(tmp_path: Path, of: str = OF, **sizes: Any) -> KeptStepMemory:
    return KeptStepMemory(cache_in(tmp_path), of, CPU, {**SIZES, **sizes})


def start(of: KeptStepMemory | None) -> tuple[int, str, bool]:
    """Bytes, what the phase says, and whether they were measured."""
    phases: list[Phase] = []
    calls: list[None] = []

    def measure() -> StepMemory:
        calls.append(None)
        return MEASURED

    num_bytes = kept_or_measured(of, measure, phases.append)
    (phase,) = phases
    assert phase.name == "profile" and phase.seconds is not None
    return num_bytes, phase.detail, bool(calls)


def test_it_is_measured_once(tmp_path: Path) -> None:
    """Workspaces and kernels are in use once it was measured, and must be left free by who did not, as what it found in
    gaps."""
    assert start(kept(tmp_path)) == (600 * 2**20, "600 MiB for the largest step, measured", True)
    later = (664 * 2**20, "664 MiB for the largest step, measured by an earlier start", False)
    assert start(kept(tmp_path)) == later
    assert start(kept(tmp_path)) == later


def test_another_step_is_measured_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(kept(tmp_path))
    assert start(kept(tmp_path, max_model_len=8192))[2]
    assert start(kept(tmp_path, of="f" * 64))[2]
    monkeypatch.setattr(step_memory, "allocator_settings", lambda: "expandable_segments:False")
    assert not start(kept(tmp_path))[2], "as captures leave it"
    monkeypatch.setattr(step_memory, "allocator_settings", lambda: "max_split_size_mb:512")
    assert start(kept(tmp_path))[2]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert start(kept(tmp_path))[2]


def test_without_a_cache_it_is_measured_each_time() -> None:
    assert start(None)[2] and start(None)[2]
    nothing = CompileCache(None, False, "it is off")
    for _ in range(2):
        assert start(KeptStepMemory(nothing, OF, CPU, SIZES))[2]


@pytest.mark.parametrize("blob", [b"", b"[]", b"{}", b'{"peak_bytes": 1}', b'{"peak_bytes": -1, "stays_bytes": 0}'])
def test_what_makes_no_sense_is_measured_again(tmp_path: Path, blob: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """And the next start finds what that came to."""
    entry = Entry.of(step_factors(OF, CPU, SIZES), {"step": blob}, created=1.0)
    cache_in(tmp_path).save(entry, {"step": blob})
    assert start(kept(tmp_path))[2]
    assert "is not used" in caplog.text
    assert not start(kept(tmp_path))[2]


@pytest.mark.gpu
def test_a_second_start_gives_the_cache_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what its own workspaces may take. What it samples with then is loaded by the first request that asks."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    folder = save(random_model(llama_config()), tmp_path / "model")
    blocks, details = [], []
    for _ in range(2):
        phases: list[Phase] = []
        with LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.5, on_phase=phases.append) as llm:
            blocks.append(llm.engine.stats.num_blocks)
        details += [phase.detail for phase in phases if phase.name == "profile"]
    assert [detail.partition(", ")[2] for detail in details] == ["measured", "measured by an earlier start"]
    assert blocks[1] == pytest.approx(blocks[0], rel=0.01)
