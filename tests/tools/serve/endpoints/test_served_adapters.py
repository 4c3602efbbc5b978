"""Adapters behind the server: named by `model`, listed, loaded and unloaded while it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from piecegraph import LLM
from piecegraph.errors import CheckpointError, ConfigError
from piecegraph.tools.cli import main
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.served_adapters import ServedAdapters
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.http.app import make_app
from tests.runner.lora.adapters import write_adapter
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

PROMPT = [5, 9, 2, 77]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, PreTrainedModel]:
    """Return the models whose tokens are wanted, by the names that requests use."""
    model = make_model("llama")
    save(model, folder / "base")
    return {"base": model, **{name: write_adapter(model, folder / name, ord(name)) for name in ("a", "b")}}


@pytest.fixture(scope="module")
def llm(folder: Path, models: dict[str, PreTrainedModel]) -> Iterator[LLM]:
    with LLM(
        folder / "base", skip_tokenizer_init=True, device="cpu", dtype="float32", compiler="eager", num_kv_blocks=16,
        enable_lora=True, max_lora_rank=4,
    ) as llm:  # fmt: skip
        yield llm


def settings(folder: Path, **changes: Any) -> ServeSettings:
    given = {"lora_modules": (("a", str(folder / "a")),), "allow_runtime_lora_updating": True, **changes}
    return ServeSettings(served_model_name=("base",), **given)


async def tokens(client: httpx.AsyncClient, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    reply = (await client.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})).json()
    assert reply["model"] == model, reply
    return [int(each.removeprefix("token_id:")) for each in reply["choices"][0]["logprobs"]["tokens"]]


async def names(client: httpx.AsyncClient) -> dict[str, Any]:
    return {each["id"]: each["parent"] for each in (await client.get("/v1/models")).json()["data"]}


async def use(client: httpx.AsyncClient, folder: Path, models: dict[str, PreTrainedModel]) -> None:
    def load(name: str, path: Path) -> Any:
        content = json.dumps({"lora_name": name, "lora_path": str(path)})
        return client.post("/v1/load_lora_adapter", content=content, headers={"Content-Type": "application/json"})

    for name in ("base", "a"):
        assert_same_tokens(models[name], PROMPT, await tokens(client, name))
    missing = await client.post("/v1/completions", json={"model": "b", "prompt": PROMPT})
    assert missing.status_code == 404 and "Known: a, base." in missing.text, missing.text
    unnamed = await load("\ud800", folder / "b")
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "lora_name", unnamed.text
    refused = await load("b", folder / "nowhere")
    assert refused.status_code == 400 and "is not a folder" in refused.text
    assert await names(client) == {"base": None, "a": "base"}
    answers, loaded = await asyncio.gather(tokens(client, "a"), load("b", folder / "b"))
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'b' added successfully."
    assert_same_tokens(models["a"], PROMPT, answers)
    for name, found in zip("aba", await asyncio.gather(*(tokens(client, each) for each in "aba")), strict=True):
        assert_same_tokens(models[name], PROMPT, found)
    assert await names(client) == {"base": None, "a": "base", "b": "base"}
    assert (await load("a", folder / "b")).status_code == 400
    unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
    assert unloaded.status_code == 200 and set(await names(client)) == {"base", "a"}
    assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "b"})).status_code == 404
    assert (await load("b", folder / "a")).status_code == 200
    assert_same_tokens(models["a"], PROMPT, await tokens(client, "b"))


def test_adapters_load_and_unload_while_others_run(llm: LLM, folder: Path, models: dict[str, PreTrainedModel]) -> None:
    """One slot and one place on the CPU: each request of another adapter reads it again."""

    async def run() -> None:
        service = GenerationService(llm, settings(folder))
        service.thread.start()
        try:
            transport = httpx.ASGITransport(app=make_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await use(client, folder, models)
        finally:
            assert await asyncio.to_thread(service.close, 60)

    asyncio.run(run())


def test_changes_are_refused_unless_they_are_allowed(llm: LLM, folder: Path) -> None:
    adapters = ServedAdapters(llm, settings(folder, allow_runtime_lora_updating=False), ("base",))
    with pytest.raises(Exception, match="allow-runtime-lora-updating") as raised:
        adapters.unload("a")
    assert raised.value.status == 403  # type: ignore[attr-defined]
    assert [each.lora_name for each in adapters] == ["a"] and "a" in adapters


def test_names_and_folders_are_checked_at_the_start(llm: LLM, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bad, kind in (((("base", str(folder / "a")),), ConfigError), ((("c", str(folder / "c")),), CheckpointError)):
        with pytest.raises(kind):
            ServedAdapters(llm, settings(folder, lora_modules=bad), ("base",))
    assert main(["serve", str(folder / "base"), "--enable-lora", "--lora-modules", "sql"]) == 3
    assert "it must be NAME=FOLDER" in capsys.readouterr().err
    assert main(["serve", str(folder / "base"), "--lora-modules", f"a={folder / 'a'}"]) == 3
    assert "give --enable-lora, too" in capsys.readouterr().err
