"""A start finds the products that an earlier one of the same model and sizes had the library run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.cache.entry import Entry
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.passes.library_products import Product
from piecegraph.runner import kept_products
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.kept_products import KeptProducts, products_factors
from piecegraph.runner.model_source import ModelSource
from tests.compiler.stored.kernel_caches import MACHINE, OF, cache_in
from tests.runner.tiny_models import llama_config, random_model, save

GPU = torch.device("cuda", 0)
NOTED = (Product(8192, 64, 128, "bfloat16", False), Product(7, 64, 128, "bfloat16", True))


@pytest.fixture(autouse=True)
def gpu_machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(kept_products, "machine_factors", lambda device: MACHINE)


def factors(dtype: torch.dtype = torch.bfloat16, layers: int = 2, **asked: Any) -> dict[str, Any]:
    config = EngineConfig(source=ModelSource(model="tiny"), **asked)
    return products_factors(config, llama_config(num_hidden_layers=layers), dtype, GPU)


def kept(tmp_path: Path, **asked: Any) -> KeptProducts:
    """As a new process has it."""
    return KeptProducts(cache_in(tmp_path), factors(**asked))


def entries(tmp_path: Path) -> list[Entry]:
    store = cache_in(tmp_path).store
    assert store is not None
    return [row.file.entry for row in store.list() if row.file.entry is not None]


def test_the_next_start_finds_them(tmp_path: Path) -> None:
    first = kept(tmp_path)
    assert first.load() == ()
    first.keep(dict.fromkeys(NOTED), OF)
    assert kept(tmp_path).load() == NOTED


def test_what_is_kept_is_not_written_again(tmp_path: Path) -> None:
    """A start from the cache runs some of them; one that runs others adds those."""
    kept(tmp_path).keep(NOTED, OF)
    (entry,) = entries(tmp_path)
    later = kept(tmp_path)
    later.load()
    later.keep(NOTED[:1], OF)
    assert [each.created for each in entries(tmp_path)] == [entry.created]
    more = NOTED[0]._replace(num_rows=48)
    later.keep([more], OF)
    assert set(kept(tmp_path).load()) == {*NOTED, more}


def test_those_of_another_plan_take_their_place(tmp_path: Path) -> None:
    kept(tmp_path).keep(NOTED, OF)
    later = kept(tmp_path)
    later.load()
    later.keep(NOTED[1:], "f" * 64)
    assert kept(tmp_path).load() == NOTED[1:]
    (entry,) = entries(tmp_path)
    assert entry.notes == {"of": "f" * 64, "products": 1}


def test_a_start_without_products_keeps_nothing(tmp_path: Path) -> None:
    kept(tmp_path).keep((), OF)
    assert not entries(tmp_path)


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": torch.float16},
        {"layers": 3},
        {"max_num_seqs": 8},
        {"cudagraph_capture_sizes": (1, 2)},
        {"max_num_batched_tokens": 512},
        {"compile": CompileConfig(passes=())},
    ],
)
def test_another_start_has_others(tmp_path: Path, asked: dict[str, Any]) -> None:
    kept(tmp_path).keep(NOTED, OF)
    assert kept(tmp_path, **asked).load() == ()


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        {"plan": OF, "products": [[1, 2, 3, "bfloat16"]]},
        {"plan": OF, "products": [[1, 2, 3, "manual_seed", False]]},
        {"plan": OF, "products": [[1, 2, -3, "bfloat16", False]]},
        {"plan": OF, "products": [[1, 2, 3, "bfloat16", 1]]},
    ],
)
def test_what_makes_no_sense_is_not_run(tmp_path: Path, said: Any, caplog: pytest.LogCaptureFixture) -> None:
    blobs = {"products": json.dumps(said).encode()}
    cache_in(tmp_path).save(Entry.of(factors(), blobs, created=1.0), blobs)
    assert kept(tmp_path).load() == ()
    assert "is not used" in caplog.text


def test_nothing_is_kept_on_a_cpu_or_without_a_cache(tmp_path: Path) -> None:
    config = EngineConfig(source=ModelSource(model="tiny"), compile=CompileConfig(cache=False))
    for device in (torch.device("cpu"), GPU):
        assert KeptProducts.open(config, llama_config(), torch.bfloat16, device) is None


def test_a_config_that_cannot_be_written_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(CompileCache, "open", lambda config: cache_in(tmp_path))
    hf_config, config = llama_config(), EngineConfig(source=ModelSource(model="tiny"))
    assert KeptProducts.open(config, hf_config, torch.bfloat16, GPU) is not None
    hf_config.made_of = object()
    assert KeptProducts.open(config, hf_config, torch.bfloat16, GPU) is None


@pytest.mark.gpu
def test_a_second_start_keeps_what_the_first_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And answers the same. Of a model whose linears `fuse-linear` takes: float32, or 32 wide, it leaves them."""
    monkeypatch.delenv("PIECEGRAPH_CACHE", raising=False)
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    folder = save(random_model(llama_config(hidden_size=128, intermediate_size=256)), tmp_path / "model")
    said, answers = [], []
    for _ in range(2):
        loaded: list[int] = []
        load = KeptProducts.load

        def counted(self: KeptProducts, load: Any = load, loaded: list[int] = loaded) -> Any:
            found = load(self)
            loaded.append(len(found))
            return found

        monkeypatch.setattr(KeptProducts, "load", counted)
        with LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, dtype="bfloat16") as llm:
            (answer,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}])
        monkeypatch.setattr(KeptProducts, "load", load)
        said += loaded
        answers.append(answer.outputs[0].token_ids)
    assert said[0] == 0 < said[1]
    assert answers[0] == answers[1]
