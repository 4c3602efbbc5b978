"""The guess whether a start will compile needs only the cache and the model's config, not torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from piecegraph import LLM, CompileConfig, environment
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Store
from piecegraph.compiler.workers.prestart import EarlyProcesses, early_processes
from piecegraph.compiler.workers.process import CompileProcess
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.startup.compile_guess import will_compile

TODAY = {"torch": version("torch") + "+cpu", "transformers": version("transformers")}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.CACHE, "on")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def config(model: Path, **how: object) -> EngineConfig:
    options = {"cache_dir": str(model.parent / "cache"), **how}
    return EngineConfig(source=ModelSource(model=str(model)), compile=CompileConfig(**options))  # type: ignore[arg-type]


def keep(folder: Path, versions: dict[str, str], **notes: object) -> None:
    entry = Entry.of({"of": notes, **versions}, {"plan": b"plan"}, created=time.time(), versions=versions, notes=notes)
    Store.open(folder.parent / "cache").save(entry, {"plan": b"plan"})


def test_an_empty_cache_means_compilation(model: Path) -> None:
    assert will_compile(config(model))


def test_a_plan_of_the_same_class_and_versions_means_no_compilation(model: Path) -> None:
    keep(model, TODAY, model="Qwen3ForCausalLM")
    keep(model, TODAY, nodes=3)  # a piece
    keep(model, {**TODAY, "torch": "1.0"}, model="LlamaForCausalLM")
    assert will_compile(config(model))
    keep(model, TODAY, model="LlamaForCausalLM")
    assert not will_compile(config(model))


def test_a_plan_of_another_class_of_the_model_type_means_no_compilation(model: Path) -> None:
    """transformers loads the text part of a model under another class than its config names."""
    keep(model, TODAY, **{"model": "Llama4Text", "class": "transformers.models.llama4.modeling_llama4.Llama4Text"})
    assert will_compile(config(model))
    keep(model, TODAY, **{"model": "LlamaText", "class": "transformers.models.llama.modeling_llama.LlamaText"})
    assert not will_compile(config(model))


def test_a_disabled_cache_means_compilation_and_eager_pieces_do_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(model, TODAY, model="LlamaForCausalLM")
    assert will_compile(config(model, cache=False))
    assert will_compile(config(model, cache="pieces"))
    assert not will_compile(config(model, compiler="eager", cache=False))
    monkeypatch.setenv(environment.CACHE, "off")
    assert will_compile(config(model))


def test_no_compilation_is_guessed_for_a_model_that_is_not_local(model: Path) -> None:
    assert not will_compile(config(model.parent / "nowhere"))
    (model / "config.json").write_text("{}")
    assert not will_compile(config(model))


def test_the_guess_imports_no_torch(model: Path) -> None:
    code = (
        "import sys; from piecegraph.runner.startup.compile_guess import will_compile; "
        "from piecegraph.runner.common.engine_config import EngineConfig; "
        "from piecegraph.runner.common.model_source import ModelSource; "
        "from piecegraph.compiler.workers import prestart, process; "
        "print(will_compile(EngineConfig(source=ModelSource(model=sys.argv[1]))), 'torch' in sys.modules)"
    )
    cache = {environment.CACHE: "on", environment.CACHE_DIR: str(model.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=environment.child_environment(cache),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_llm_that_will_compile_starts_compile_processes_before_loading(
    is_kept: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes end when loading fails."""
    found: list[EarlyProcesses] = []
    processes: list[CompileProcess] = []

    def load_engine(*arguments: object) -> None:
        early = early_processes()
        assert early is not None
        found.append(early)
        if early.folders() is not None:
            processes.extend(early.take())
            assert all(each.process.poll() is None for each in processes)
            early._processes.extend(processes)
        raise ZeroDivisionError

    monkeypatch.setattr("piecegraph.runner.startup.load_engine.load_engine", load_engine)
    if is_kept:
        keep(model, TODAY, model="LlamaForCausalLM")
    with pytest.raises(ZeroDivisionError):
        LLM(str(model), compilation_config=config(model).compile, compile_workers=3)
    assert len(found) == 1
    assert len(processes) == (0 if is_kept else 2)
    assert all(each.process.poll() is not None for each in processes)
