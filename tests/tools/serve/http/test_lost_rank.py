"""A server without requests whose rank is killed says so: the thread of the engine, `/health`, and the next request."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
import pytest

from piecegraph import LLM
from piecegraph.errors import WorkerError
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.http.app import make_app
from tests.runner.distributed.sleeping_ranks import DEADLINE_S, SleepingRanks, kill
from tests.runner.tiny_models import make_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")


def test_a_rank_that_is_killed_while_nothing_runs_makes_the_server_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model("llama"), tmp_path)
    executor, told = SleepingRanks(2), list[BaseException]()

    async def use(llm: LLM) -> None:
        service = GenerationService(llm, ServeSettings(served_model_name=("base",)), on_failure=told.append)
        service.thread.start()
        transport = httpx.ASGITransport(app=make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/health")).status_code == 200
            kill(executor.pids[0])
            deadline = time.monotonic() + DEADLINE_S
            while (await client.get("/health")).status_code != 503:
                assert time.monotonic() < deadline, "the server does not notice that its rank is gone"
                await asyncio.sleep(0.05)
            reply = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_stopped"
            assert re.search(r"rank 1 \(process \d+\) ended with exit code -9", reply.json()["error"]["message"])
            assert (await client.get("/ready")).json() == {"status": "failed"}
        assert await asyncio.to_thread(service.close, 60)

    options = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "compiler": "eager"}
    with LLM(folder, num_kv_blocks=16, **options) as llm:  # type: ignore[arg-type]
        monkeypatch.setattr(llm, "_executor", executor)
        asyncio.run(use(llm))
    assert isinstance(told[0], WorkerError) and len(told) == 1
