"""Kernels of a step that no piece has are compiled while pieces are: all of them, and in no start from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import CompileConfig
from piecegraph.progress import STEP_KERNELS, Phase
from piecegraph.runner import compile_model as compiling
from piecegraph.runner.attention.triton_backend import TritonImpl
from piecegraph.runner.compile_model import CompiledLM, compile_model
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.model_loader import LoadedModel
from piecegraph.runner.model_source import ModelSource
from piecegraph.runner.model_step import ModelStep
from piecegraph.runner.step_kernels import StepKernels, launch_step_kernels
from piecegraph.runner.without_weights import load_without_weights
from tests.runner.tiny_models import FAMILIES, MAX_LEN, llama_config, random_model, save

CPU = torch.device("cpu")


class Launches:
    """What was launched of steps whose model is left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[ModelStep] = []  # that ran to their end
        self.layers: list[dict[str, Any]] = []  # that attended, by how they were bound
        prepare = TritonImpl.prepare

        def prepared(impl: TritonImpl, *tensors: torch.Tensor, **how: Any) -> Any:
            self.layers.append({**how, "num_rows": tensors[0].shape[0]})
            return prepare(impl, *tensors, **how)

        def launch(step: ModelStep, **how: Any) -> None:
            launch_step_kernels(step, **how)
            self.steps.append(step)

        monkeypatch.setattr(TritonImpl, "prepare", prepared)
        monkeypatch.setattr(compiling, "launch_step_kernels", launch)


def compiled(
    folder: Path, phases: list[Phase], *, stand_in: bool = True, passes: tuple[str, ...] = ()
) -> tuple[CompiledLM, list[str]]:
    """And what happened, in order."""
    config = EngineConfig(
        source=ModelSource(model=str(folder), load_format="dummy"),
        device="cpu",
        attention_backend="triton",
        max_num_seqs=4,
        num_kv_blocks=8,
        compile=CompileConfig(compiler="eager", passes=passes),
    )
    happened: list[str] = []
    without_weights = load_without_weights(config)

    def load() -> LoadedModel:
        happened.append("load")
        return without_weights  # of fake tensors, which compile as well

    def on_phase(phase: Phase) -> None:
        phases.append(phase)
        if phase.seconds is not None:
            happened.append(phase.name)

    return compile_model(without_weights if stand_in else None, load, config, MAX_LEN, 2 * MAX_LEN, on_phase), happened


def config_only(family: str, folder: Path) -> Path:
    FAMILIES[family]().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("passes", [(), ("fuse-rope-kv-write",)], ids=" ".join)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_a_layer_of_each_kind_attends_once(
    family: str, passes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To as many tokens as a step may have; then the sampler draws. The thread says how long it took."""
    launches, phases = Launches(monkeypatch), list[Phase]()
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    model, happened = compiled(config_only(family, tmp_path), phases, passes=passes)
    assert len(launches.steps) == 1
    windows = {layer.window for layer in model.layers}
    assert len(model.layers) > len(windows)
    assert sorted(each["window"] for each in launches.layers) == sorted(windows)
    assert {each["num_rows"] for each in launches.layers} == {2 * MAX_LEN}
    assert {each["rotary"] is not None for each in launches.layers} == {bool(passes)}
    assert happened.index("split") < happened.index("load") < happened.index(STEP_KERNELS)
    (phase,) = [phase for phase in phases if phase.name == STEP_KERNELS]
    assert phase.seconds is not None and phase.seconds > 0


def test_where_nothing_compiles_or_no_kernel_is_taken_there_is_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; and where weights were there first, as in a start from the cache."""
    launches, phases = Launches(monkeypatch), list[Phase]()
    compiled(config_only("llama", tmp_path), phases)
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    compiled(tmp_path, phases, stand_in=False)
    assert not launches.layers
    assert STEP_KERNELS not in [phase.name for phase in phases]


def test_what_fails_there_is_nothing_to_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: ModelStep, **how: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(compiling, "launch_step_kernels", fail)
    model, _ = compiled(config_only("llama", tmp_path), [])
    assert model.layers


def test_a_thread_that_was_not_started_is_not_waited_for() -> None:
    phases: list[Phase] = []
    StepKernels(lambda: None, CPU).wait(phases.append)
    assert not phases


@pytest.mark.gpu
def test_after_them_a_start_on_a_gpu_compiles_nothing_in_profile_and_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piecegraph import LLM
    from piecegraph.passes.kernels import own_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    compiled_kernels: list[str] = []
    by_phase: dict[str, list[str]] = {}

    def on_phase(phase: Phase) -> None:
        if phase.seconds is not None:
            by_phase[phase.name] = list(compiled_kernels)
            compiled_kernels.clear()

    compile_with = own_kernel.compile_with

    def counting(chosen: own_kernel.CompileKernel | None) -> None:
        def compile(plain: Any, src: Any, **how: Any) -> Any:
            compiled_kernels.append(src.name)
            return plain(src, **how) if chosen is None else chosen(plain, src, **how)

        compile_with(compile)

    monkeypatch.setattr("piecegraph.compiler.stored.own_kernels.compile_with", counting)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80}  # no other test of this process has
    save(random_model(llama_config(**heads)), tmp_path / "model")
    with LLM(str(tmp_path / "model"), skip_tokenizer_init=True, dtype="bfloat16", on_phase=on_phase):
        pass
    assert "decode_kernel" in {name for names in by_phase.values() for name in names}
    assert by_phase["profile"] == by_phase["capture"] == []
