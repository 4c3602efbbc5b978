"""What cannot be compiled ahead is refused, and why; what can is compared with a start in
tests/tools/commands/test_compile.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.cache.store.store import Store
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.config import CompileConfig
from piecegraph.errors import CacheError, CompileError, ConfigError, KeyFactorError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.startup import compile_ahead as module
from piecegraph.runner.startup.compile_ahead import check_can_compile_for, compile_ahead
from tests.runner.speculative.heads.random_heads import save_eagle3
from tests.runner.tiny_models import llama_config, random_model


@pytest.fixture(autouse=True)
def plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    llama_config(num_hidden_layers=1).save_pretrained(str(tmp_path / "model"))
    return EngineConfig(source=ModelSource(model=str(tmp_path / "model")), device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "cache", key_file=tmp_path / "own.key")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_missing_gpu_is_refused_with_the_reason(
    device: Any, config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CompileError, match="torch sees none here .*of the kind that will run the model.*CUDA build"):
        compile_ahead(replace(config, device=device), store)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_an_available_device_is_accepted(device: Any) -> None:
    check_can_compile_for(device)


@pytest.mark.parametrize(
    ("chosen", "variable", "reason"),
    [
        (CompileConfig(compiler="eager"), "on", "eager pieces are not stored"),
        (CompileConfig(cache=False), "on", "cache=False"),
        (CompileConfig(), "pieces", "PIECEGRAPH_CACHE=pieces"),
        (CompileConfig(), "off", "PIECEGRAPH_CACHE=off"),
    ],
)
def test_a_disabled_cache_cannot_be_filled(
    chosen: CompileConfig,
    variable: str,
    reason: str,
    config: EngineConfig,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", variable)
    with pytest.raises(ConfigError, match=f"nothing to fill a cache with: {reason}"):
        compile_ahead(replace(config, compile=chosen), store)


def nothing_compiles(*args: Any, **options: Any) -> Any:
    raise AssertionError("it was refused before")


def test_a_model_without_a_cache_key_is_refused_before_compilation(
    config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is neither parameter nor buffer would come of weights, which are not there."""

    def with_a_tensor(*args: Any) -> Any:
        loaded = load_without_weights(*args)
        loaded.model.half_of_the_head = torch.empty(4, device="meta")
        return loaded

    monkeypatch.setattr(module, "load_without_weights", with_a_tensor)
    monkeypatch.setattr(module, "load_or_compile", nothing_compiles)
    with pytest.raises(KeyFactorError, match="this model cannot be cached: .*half_of_the_head is a tensor"):
        compile_ahead(config, store)


def refuse(error: Exception) -> Callable[..., Any]:
    def raises(*args: Any, **options: Any) -> Any:
        raise error

    return raises


def test_unsupported_layers_are_refused_before_compilation(
    config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "piecegraph.runner.startup.compiling.decide.check_layers", refuse(UnsupportedModel("no such attention"))
    )
    monkeypatch.setattr("piecegraph.compiler.building.inductor_pieces.InductorPieceCompiler.compile", nothing_compiles)
    with pytest.raises(UnsupportedModel, match="no such attention"):
        compile_ahead(replace(config, compile=CompileConfig(compile_workers=0)), store)


def test_a_result_that_cannot_be_stored_is_an_error(
    config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it to be kept does not have it."""
    monkeypatch.setattr("piecegraph.compiler.building.inductor_pieces.InductorPieceCompiler.compile", eagerly)
    monkeypatch.setattr(PlanStore, "save", lambda plans, cold: "No space left on device")
    with pytest.raises(CacheError, match="was compiled, but could not be stored: No space left on device"):
        compile_ahead(replace(config, compile=CompileConfig(compile_workers=0)), store)


def test_a_note_names_what_needs_weights(config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.compiler.building.inductor_pieces.InductorPieceCompiler.compile", eagerly)
    monkeypatch.setattr(PlanStore, "save", lambda plans, cold: "")
    found = compile_ahead(replace(config, compile=CompileConfig(compile_workers=0, selfcheck=True)), store)
    assert (found.was_cached, found.report.num_unique_pieces) == (False, 2)
    assert found.notes == ("selfcheck: it runs the model, which only a start does",)


def eagerly(compiler: Any, pieces: Any, on_piece: Any, post_grad: Any, *, meanwhile: Any) -> Any:
    from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler

    return EagerPieceCompiler().compile(pieces, on_piece, post_grad)


@pytest.mark.slow
def test_kernels_of_a_step_are_compiled_too(
    config: EngineConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each start from a cache that is only read would compile them. That they cannot be stored is an error."""
    config = replace(config, compile=CompileConfig(compile_workers=0))
    compiled: list[Any] = []
    monkeypatch.setattr(module, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(module, "compile_step_kernels", lambda decided, *rest: compiled.append(decided))
    for error in ("", "the disk is full"):
        monkeypatch.setattr(OWN_KERNELS, "save", lambda error=error: error)
        message = f"kernels were compiled, but could not be stored: {error}"
        with pytest.raises(CacheError, match=message) if error else nullcontext():
            compile_ahead(config, store)
    assert [layer.num_q_heads for each in compiled for layer in each.layers] == [4, 4]


@pytest.mark.slow
def test_a_draft_is_compiled_too(config: EngineConfig, store: Store, tmp_path: Path) -> None:
    """Without weights; a start with both then compiles nothing. A draft that does not fit is refused before."""
    draft = tmp_path / "draft"
    llama_config(num_hidden_layers=2, intermediate_size=48).save_pretrained(str(draft))
    speculative = SpeculativeConfig(method="draft_model", model=str(draft), num_speculative_tokens=2)
    asked = replace(config, speculative=speculative)
    first, again = compile_ahead(asked, store), compile_ahead(asked, store)
    assert first.draft is not None and again.draft is not None
    assert not first.was_cached and not first.draft.was_cached
    assert again.was_cached and again.draft.was_cached and again.draft.key == first.draft.key != first.key
    assert compile_ahead(replace(config, source=ModelSource(model=str(draft))), store).was_cached
    llama_config(vocab_size=77).save_pretrained(str(draft))
    with pytest.raises(ConfigError, match="the draft model: .*a vocabulary of 77 tokens"):
        compile_ahead(asked, store)


@pytest.mark.slow
def test_a_head_is_compiled_too(config: EngineConfig, store: Store, tmp_path: Path) -> None:
    """With the hidden states that leave the model, which make its plan another one."""
    model = random_model(llama_config(num_hidden_layers=1))
    head = save_eagle3(model, tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    speculative = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=2)
    asked = replace(config, speculative=speculative)
    first, again = compile_ahead(asked, store), compile_ahead(asked, store)
    assert first.draft is not None and again.draft is not None
    assert not first.was_cached and not first.draft.was_cached
    assert again.was_cached and again.draft.was_cached
    assert len({first.key, first.draft.key, compile_ahead(config, store).key}) == 3
