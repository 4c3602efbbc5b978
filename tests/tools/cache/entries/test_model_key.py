from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import diff_factors
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.runner.common.config_on_device import static_sizes
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.tools.cache.entries.model_key import changed_source, model_key
from piecegraph.tools.command_line.compile_flags import engine_config
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES
from tests.tools.cache.models import NOW, CacheCommand, save


@pytest.fixture(autouse=True)
def plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)


def saved_model(folder: Path, family: str) -> EngineConfig:
    """Return the config of an `LLM` over a folder with weights."""
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(str(folder))
    return engine_config(str(folder), {"dtype": "float32", "device": "cpu"})


def looked_up(config: EngineConfig) -> PlanStore:
    """Return the key that `LLM` looks up, for the model with its weights read."""
    cpu = torch.device("cpu")
    hf_config = load_config(config.source)
    loaded = load_model(config.source, hf_config, dtype=torch.float32, device=cpu)
    fix_longrope(loaded.model, model_length(hf_config, config.max_model_len))
    compile = replace(config.compile, compile_sizes=static_sizes(config, is_cuda=False))
    module = CausalLMForward(loaded.model, loaded.first_position)
    with torch.no_grad():
        call = ExampleCall.of(module, example_inputs(cpu), {}, DYNAMIC_DIMS)
        return PlanStore.of(CompileCache.open(compile), module, call, compile)


@pytest.mark.parametrize("family", families(FAMILIES))
def test_the_key_is_that_of_the_model_with_its_weights(family: str, tmp_path: Path) -> None:
    """The keys are equal in every factor; no weights are read for it."""
    config = saved_model(tmp_path, family)
    found, wanted = model_key(config), looked_up(config)
    assert diff_factors(found.factors, wanted.factors) == ()
    assert found.key == wanted.key is not None


def test_random_weights_have_the_key_of_random_weights(tmp_path: Path) -> None:
    config = saved_model(tmp_path, "llama")
    config = replace(config, source=replace(config.source, load_format="dummy"))
    assert model_key(config).key == looked_up(config).key


def test_a_model_that_is_not_stored_has_no_key(tmp_path: Path) -> None:
    config = saved_model(tmp_path, "llama")
    eager = replace(config, compile=replace(config.compile, compiler="eager"))
    assert (model_key(eager).key, model_key(eager).reason) == (None, "eager pieces are not stored")


def test_why_a_model_has_no_hit(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    """The nearest entry differs in what is different now."""
    folder = tmp_path / "model"
    now = model_key(saved_model(folder, "llama"))
    before = {**now.factors, "build": {**now.factors["build"], "triton": "2.0"}}
    old = save(store, before, {"plan": b"{}"}, {}, {"model": "LlamaForCausalLM"}).key
    command = ("why", str(folder), "--dtype", "float32", "--device", "cpu")
    (answer,) = cache.json(*command)
    assert (answer["asked"], answer["key"], answer["reason"]) == (str(folder), now.key, "absent")
    assert answer["nearest"]["key"] == old
    triton = now.factors["build"]["triton"]
    assert answer["nearest"]["differences"] == [{"path": "build.triton", "left": triton, "right": "2.0"}]
    assert f"{folder}: {str(now.key)[:12]}  miss: absent" in cache(*command)


def other_epsilon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def other_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.compiler.plans.plan_factors.version_of", lambda distribution: "9.9")


def other_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)  # what OMP_NUM_THREADS has come to


def nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "flags", "paths"),
    [
        (nothing, {"--dtype": "bfloat16"}, {"model.objects.object 0.dtype", "model.weights.model.lm_head.weight"}),
        (nothing, {"--passes": "-merge-projections"}, {"config.passes"}),
        (other_transformers, {}, {"build.transformers"}),
        (
            other_epsilon,
            {},
            {"model.objects.object 0.rms_norm_eps", "model.modules.model.model.norm.variance_epsilon"},
        ),
        (other_threads, {}, {"settings.num_threads"}),
    ],
    ids=["dtype", "pass", "transformers", "epsilon", "threads"],
)
def test_what_was_changed_is_named(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    flags: dict[str, str],
    paths: set[str],
    store: Store,
    cache: CacheCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else is named, except what follows from the change in the model."""
    folder = tmp_path / "model"
    before = model_key(saved_model(folder, "llama"))
    old = save(store, before.factors, {"plan": b"{}"}, {}, {"model": "LlamaForCausalLM"}).key
    change(folder, monkeypatch)
    given = {"--dtype": "float32", "--device": "cpu", **flags}
    (answer,) = cache.json("why", str(folder), *(word for pair in given.items() for word in pair))
    assert (answer["reason"], answer["nearest"]["key"]) == ("absent", old)
    found = {each["path"] for each in answer["nearest"]["differences"]}
    assert paths <= found
    assert all(path.startswith("model.") for path in found - paths)


def test_why_a_model_has_a_hit(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    now = model_key(saved_model(folder, "llama"))
    assert now.key is not None
    save(store, now.factors, {"plan": json.dumps({"sources": {}}).encode()}, {}, {})
    (answer,) = cache.json("why", str(folder), "--dtype", "float32", "--device", "cpu")
    assert (answer["key"], answer["is_hit"], answer["nearest"]) == (now.key, True, None)


def test_a_traced_source_that_changed_makes_a_miss(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    now = model_key(saved_model(folder, "llama"))
    plan = json.dumps({"sources": {"piecegraph.runner.models.causal_lm": "0" * 64}}).encode()
    save(store, now.factors, {"plan": plan}, {}, {})
    (answer,) = cache.json("why", str(folder), "--dtype", "float32", "--device", "cpu")
    assert (answer["reason"], answer["detail"]) == ("source changed", "piecegraph.runner.models.causal_lm")


def test_a_model_of_which_nothing_is_kept(cache: CacheCommand, tmp_path: Path) -> None:
    saved_model(tmp_path / "model", "llama")
    command = ("why", str(tmp_path / "model"), "--compiler", "eager", "--device", "cpu")
    assert cache.json(*command)[0]["key"] is None
    assert cache(*command) == f"{tmp_path}/model  is not kept: eager pieces are not stored\n"


def test_no_such_model(cache: CacheCommand, tmp_path: Path) -> None:
    cache("why", str(tmp_path / "none"), code=3)
    assert "no folder" in cache.err


def test_changed_source_reads_the_plan() -> None:
    entry = Entry.of({}, {}, created=NOW)
    assert changed_source(Loaded(entry, {"plan": b'{"sources": {}}'})) is None
    assert changed_source(Loaded(entry, {"plan": b'{"sources": {"no.such.module": "0"}}'})) == "no.such.module"
