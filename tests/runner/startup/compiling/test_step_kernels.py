"""Kernels of a step that no piece has are compiled while pieces are: all of them, and in no start from the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph import CompileConfig, CompiledModel
from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler
from piecegraph.progress import STEP_KERNELS, Phase
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.backend import TritonImpl
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.startup.compiling import compile_model as compiling
from piecegraph.runner.startup.compiling import decide
from piecegraph.runner.startup.compiling.compile_model import CompiledLM, compile_model
from piecegraph.runner.startup.compiling.step_kernels import StepKernels, launch_step_kernels
from piecegraph.runner.state_layers import decode_kernels, ops
from piecegraph.runner.state_layers.kernels.calls import StepKernel
from piecegraph.runner.step.model_step import ModelStep
from tests.runner.tiny_models import FAMILIES, HYBRIDS, MAX_LEN, make_config, random_model, save

CPU = torch.device("cpu")
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
SIZES_OF_ITS_OWN: dict[str, dict[str, Any]] = {
    "LlamaConfig": {**_HEADS, "head_dim": 80},
    "Qwen3_5TextConfig": {
        **_HEADS, **_LINEAR, "head_dim": 96, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
        "linear_num_value_heads": 6,
    },
    "BambaConfig": {
        **_HEADS, "num_hidden_layers": 3, "attn_layer_indices": [1], "attn_rotary_emb": 4, "hidden_size": 64,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
    },
}  # fmt: skip
"""Sizes that no other test of this process has."""
MAX_NUM_SEQS = 4


class Launches:
    """The kernels launched for steps without their model, and the order of events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.delay_s = 0.0
        self.steps: list[ModelStep] = []  # that ran to their end
        self.layers: list[AttentionCall] = []  # the calls that were bound
        prepare = TritonImpl.prepare

        def prepared(impl: TritonImpl, call: AttentionCall, kv_cache: KVCache) -> Any:
            self.layers.append(call)
            return prepare(impl, call, kv_cache)

        def launch(step: ModelStep, **how: Any) -> None:
            time.sleep(self.delay_s)
            launch_step_kernels(step, **how)
            self.steps.append(step)
            self.happened.append("launched")

        compile_pieces = EagerPieceCompiler.compile

        def compile_beside(compiler: EagerPieceCompiler, *pieces: Any, meanwhile: Callable[[], object]) -> Any:
            meanwhile()  # as Inductor's processes leave time for
            return compile_pieces(compiler, *pieces, meanwhile=meanwhile)

        monkeypatch.setattr(EagerPieceCompiler, "compile", compile_beside)
        monkeypatch.setattr(TritonImpl, "prepare", prepared)
        monkeypatch.setattr(decide, "launch_step_kernels", launch)


def compiled(
    folder: Path,
    launches: Launches | None = None,
    *,
    stand_in: bool = True,
    passes: tuple[str, ...] = (),
    background: BackgroundCompile | None = None,
    **options: Any,
) -> CompiledLM:
    happened = [] if launches is None else launches.happened
    config = EngineConfig(
        source=ModelSource(model=str(folder), load_format="dummy"),
        device="cpu",
        attention_backend="triton",
        max_num_seqs=MAX_NUM_SEQS,
        num_kv_blocks=8,
        compile=CompileConfig(compiler="eager", passes=passes),
        **options,
    )
    without_weights = load_without_weights(config)

    def load() -> LoadedModel:
        happened.append("load")
        return without_weights  # of fake tensors, which compile as well

    def on_phase(phase: Phase) -> None:
        if phase.seconds is not None:
            happened.append(phase.name)

    first = without_weights if stand_in else None
    return compile_model(first, load, config, MAX_LEN, 2 * MAX_LEN, on_phase, background=background)


def config_only(family: str, folder: Path) -> Path:
    {**FAMILIES, **HYBRIDS}[family]().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("passes", [(), ("fuse-rope-kv-write",)], ids=" ".join)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_a_layer_of_each_kind_attends_once(
    family: str, passes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To as many tokens as there may be requests; then the sampler draws. It begins when weights are there, and is over
    when the model is compiled."""
    launches = Launches(monkeypatch)
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    model = compiled(config_only(family, tmp_path), launches, passes=passes)
    assert len(launches.steps) == 1
    windows = {layer.window for layer in model.layers}
    assert len(model.layers) > len(windows)
    assert sorted(call.window for call in launches.layers) == sorted(windows)
    assert {call.query.shape[0] for call in launches.layers} == {MAX_NUM_SEQS}
    assert {call.rotary is not None for call in launches.layers} == {bool(passes)}
    for names in (("split", "load", "launched", STEP_KERNELS), ("split", "load", "compile", STEP_KERNELS)):
        assert [each for each in launches.happened if each in names] == list(names)


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["plain", "drafts"])
def test_a_layer_of_each_kind_with_a_state_runs_once(
    drafts: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over states of one block, and with drafts over last states of the layers that run, and of no others."""
    launches, ran = Launches(monkeypatch), list[str]()
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    run_layer = ops.run_layer

    def recorded(*arguments: Any) -> None:
        ran.append(arguments[2])
        run_layer(*arguments)

    monkeypatch.setattr(ops, "run_layer", recorded)
    model = compiled(config_only("qwen3.5", tmp_path), launches, speculative=SpeculativeConfig.parse(drafts))
    (name,) = ran
    assert name in {layer.name for layer in model.state_layers} and len(model.state_layers) == 2
    (step,) = launches.steps
    assert list(step.recent_states) == (ran if drafts else [])
    assert [call.layer for call in launches.layers] == [model.layers[0].name]


def test_layers_with_states_run_as_in_a_graph_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host plans a batch, as for a GPU, the kernels that read it on the device are launched beside."""
    launches, ran, launched = Launches(monkeypatch), list[str](), list[str]()
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(decide, "needs_host_batches", lambda *given: True)
    monkeypatch.setattr(decode_kernels, "runs_kernels", lambda metadata, x: metadata.host is None)
    monkeypatch.setattr(StepKernel, "launch", lambda kernel: launched.append(kernel.kernel.__name__))
    run_layer = ops.run_layer

    def recorded(*arguments: Any) -> None:
        ran.append(arguments[2])
        run_layer(*arguments)

    monkeypatch.setattr(ops, "run_layer", recorded)
    compiled(config_only("qwen3.5", tmp_path), launches)
    assert len(ran) == 1 and launched == ["conv_step_kernel", "delta_step_kernel"]


def test_no_thread_starts_without_kernels_or_when_weights_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    compiled(config_only("llama", tmp_path), launches)  # on a CPU
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    compiled(tmp_path, launches, stand_in=False)
    assert not launches.layers
    assert STEP_KERNELS not in launches.happened


def test_a_fast_start_has_them_when_the_model_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights come first, and its pieces are compiled later; the step that is profiled then finds its kernels."""
    launches = Launches(monkeypatch)
    launches.delay_s = 0.2
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    compiled(config_only("llama", tmp_path), launches, stand_in=False, background=BackgroundCompile())
    assert launches.happened.index("trace") < launches.happened.index("launched")
    assert launches.happened[-1] == STEP_KERNELS


def test_a_start_from_the_cache_has_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start from the cache asks for the weights first, and then reports the calls of the model."""
    launches = Launches(monkeypatch)
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    compile_module = pg.compile

    def from_the_cache(module: nn.Module, config: CompileConfig, **how: Any) -> CompiledModel:
        module = how.pop("load_weights")()
        return compile_module(module, config, **how)

    monkeypatch.setattr(compiling, "compile_module", from_the_cache)
    compiled(config_only("llama", tmp_path), launches)
    assert launches.happened.index("load") < launches.happened.index("split")
    assert not launches.layers


def test_a_failure_in_the_thread_is_logged_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: ModelStep, **how: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(decide, "launch_step_kernels", fail)
    assert compiled(config_only("llama", tmp_path)).layers
    assert "kernels of a step could not be compiled ahead" in caplog.text and "no memory" in caplog.text


def test_a_thread_that_was_not_started_is_not_waited_for() -> None:
    phases: list[Phase] = []
    kernels = StepKernels(lambda: None, CPU)
    kernels.wait()
    kernels.report(phases.append)
    assert not phases


def test_an_error_of_the_compile_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is done by then."""
    launches = Launches(monkeypatch)
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)

    def fails(module: nn.Module, config: CompileConfig, **how: Any) -> CompiledModel:
        pg.compile(module, config, **{**how, "on_phase": None})  # nobody waits
        raise ZeroDivisionError

    monkeypatch.setattr(compiling, "compile_module", fails)
    launches.delay_s = 0.5
    with pytest.raises(ZeroDivisionError):
        compiled(config_only("llama", tmp_path), launches)
    assert len(launches.steps) == 1 and STEP_KERNELS not in launches.happened


@pytest.mark.parametrize("name", ["compile_sizes", "tune_sizes"])
def test_no_piece_is_timed_while_the_thread_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That holds, too, if weights are loaded after the pieces, from the cache or by a compile in this process."""
    launches = Launches(monkeypatch)
    monkeypatch.setattr(compiling, "compiles_kernels", lambda device: True)

    def late(module: nn.Module, config: CompileConfig, **how: Any) -> CompiledModel:
        load_weights, on_phase = how.pop("load_weights"), how.pop("on_phase")
        model = pg.compile(module, config, **how)
        load_weights()
        on_phase(Phase(name=name))
        launches.happened.append(name)
        return model

    monkeypatch.setattr(compiling, "compile_module", late)
    launches.delay_s = 0.5
    compiled(config_only("llama", tmp_path), launches)
    assert launches.happened[-4:] == ["launched", "kernels", name, STEP_KERNELS]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3_5TextConfig", "BambaConfig"])
def test_profile_and_capture_on_a_gpu_compile_no_further_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piecegraph import LLM
    from piecegraph.passes.kernels.common import own_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    compiled_kernels: list[str] = []
    by_phase: dict[str, list[str]] = {}

    def on_phase(phase: Phase) -> None:
        if phase.seconds is not None:
            by_phase.setdefault(phase.name, []).extend(compiled_kernels)  # there are two of some
            compiled_kernels.clear()

    compile_with = own_kernel.compile_with

    def counting(chosen: own_kernel.CompileKernel | None) -> None:
        def compile(plain: Any, src: Any, **how: Any) -> Any:
            compiled_kernels.append(src.name)
            return plain(src, **how) if chosen is None else chosen(plain, src, **how)

        compile_with(compile)

    monkeypatch.setattr("piecegraph.compiler.own_kernels.registry.compile_with", counting)
    config = make_config(name, **SIZES_OF_ITS_OWN[name])
    save(random_model(config), tmp_path / "model")
    with LLM(str(tmp_path / "model"), skip_tokenizer_init=True, dtype="bfloat16", on_phase=on_phase):
        pass
    every = {
        "LlamaConfig": "decode_kernel",
        "Qwen3_5TextConfig": "delta_step_kernel",
        "BambaConfig": "scan_step_kernel",
    }
    assert every[name] in {kernel for kernels in by_phase.values() for kernel in kernels}
    assert by_phase["profile"] == by_phase["capture"] == []
