"""A server that sleeps: requests get 503 meanwhile, and the answers of before afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import UsageError
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.http.app import make_app
from tests.runner.tiny_models import make_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

BODY = {"prompt": [5, 9, 2], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}

Use = Callable[[httpx.AsyncClient, GenerationService], Awaitable[None]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save(make_model("llama"), tmp_path_factory.mktemp("llama"))
    with LLM(
        folder, skip_tokenizer_init=True, device="cpu", dtype="float32", compiler="eager", num_kv_blocks=16
    ) as llm:
        yield llm


def serve(llm: LLM, use: Use, *, enable_sleep_mode: bool = True) -> None:
    """Have `use` talk with a server of `llm` in this process."""

    async def run() -> None:
        settings = ServeSettings(served_model_name=("base",), enable_sleep_mode=enable_sleep_mode)
        service = GenerationService(llm, settings)
        service.thread.start()
        try:
            transport = httpx.ASGITransport(app=make_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await use(client, service)
        finally:
            assert await asyncio.to_thread(service.close, 60)

    asyncio.run(run())


async def tokens(client: httpx.AsyncClient) -> list[str]:
    reply = await client.post("/v1/completions", json={**BODY, "return_tokens_as_token_ids": True})
    assert reply.status_code == 200, reply.text
    found: list[str] = reply.json()["choices"][0]["logprobs"]["tokens"]
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_answers_after_a_wake_up_are_those_from_before(level: int, llm: LLM) -> None:
    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        before = await tokens(client)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        slept = await client.post("/sleep", params={"level": level})
        assert slept.status_code == 200 and slept.json()["is_sleeping"] and slept.json()["freed_bytes"] > 0
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "sleeping"
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "sleeping"})
        assert (await client.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await client.get("/ready")).status_code == 200
        assert await tokens(client) == before

    serve(llm, use)


def test_a_request_that_comes_while_the_engine_falls_asleep_gets_503(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has looked before a program called `llm.sleep`: requests and streams are refused by the engine."""
    monkeypatch.setattr(GenerationService, "is_asleep", False)

    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        before = await tokens(client)
        await service.thread.call(llm.sleep)
        try:
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and "Retry-After" in refused.headers
            error = refused.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"] == "the engine sleeps; call wake_up first."
            stream = await client.post("/v1/completions", json={**BODY, "stream": True})
            assert "the engine sleeps" in stream.text and stream.text.endswith("data: [DONE]\n\n")
            assert (await client.get("/health")).status_code == 200
        finally:
            await service.thread.call(llm.wake_up)
        assert await tokens(client) == before

    serve(llm, use)


def test_a_program_may_sleep_beside_the_thread_that_serves(llm: LLM) -> None:
    """From any thread, while requests come: each gets the answer of before or is refused, and the thread lives on."""

    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        before = await tokens(client)

        async def ask(count: int) -> None:
            for _ in range(count):
                reply = await client.post("/v1/completions", json={**BODY, "return_tokens_as_token_ids": True})
                if reply.status_code == 200:
                    assert reply.json()["choices"][0]["logprobs"]["tokens"] == before
                else:
                    assert reply.status_code == 503 and "Retry-After" in reply.headers, reply.text
                await asyncio.sleep(0)

        for level in (1, 2, 1):
            asking = [asyncio.create_task(ask(count)) for count in (1, 3)]
            while not llm.is_sleeping:
                with contextlib.suppress(UsageError):  # requests are unfinished
                    await asyncio.to_thread(llm.sleep, level)
            assert (await client.get("/ready")).json() == {"status": "sleeping"}
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "sleeping"
            assert (await client.get("/health")).status_code == 200
            await asyncio.to_thread(llm.wake_up)
            assert await tokens(client) == before
            await asyncio.gather(*asking)

    serve(llm, use)


def test_a_program_that_generates_beside_the_thread_that_serves_does_not_end_it(llm: LLM) -> None:
    """What another thread has queued is none of the thread's, and a step that is refused is tried again."""

    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        before = await tokens(client)
        running, may_end = threading.Event(), threading.Event()

        def one_step_waits(request_id: str) -> None:
            execute = llm.runner.execute_model

            def waiting(*arguments: Any, **options: Any) -> None:
                running.set()
                assert may_end.wait(60)
                execute(*arguments, **options)

            llm.engine.add_request(request_id, [5], SamplingParams(max_tokens=1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(llm.runner, "execute_model", waiting)
                llm.engine.step()

        program = asyncio.create_task(asyncio.to_thread(one_step_waits, "the program's"))
        await asyncio.to_thread(running.wait, 60)
        with pytest.raises(UsageError, match="another thread is using the engine"):
            await asyncio.to_thread(llm.engine.refuse_requests, "no")
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
        assert (await client.get("/health")).status_code == 200
        may_end.set()
        await program
        assert await tokens(client) == before

    serve(llm, use)


def test_what_cannot_be_done_is_refused_and_changes_nothing(llm: LLM) -> None:
    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        for path, message in (
            ("/sleep?level=3", "level=3; it must be 1"),
            ("/sleep?level=deep", "level=deep; it must be one number"),
            ("/sleep?level=1&level=2", "level=1 and 2; it must be one number"),
            ("/sleep?lvel=2", "unknown parameter 'lvel'. Did you mean 'level'?"),
            ("/sleep?mode=abort", "unknown parameter 'mode'. Known: level."),
            ("/wake_up?tags=weights&tags=kv_cache", "tags=['weights', 'kv_cache']; everything wakes up together"),
            ("/wake_up?level=1", "unknown parameter 'level'. Known: tags."),
        ):
            refused = await client.post(path)
            error = refused.json()["error"]
            assert refused.status_code == 400 and message in error["message"], refused.text
            assert error["param"] in path
        assert (await client.get("/is_sleeping?level=1")).status_code == 400
        with service.places(1):  # as a request that is being tokenized
            busy = await client.post("/sleep")
        assert busy.status_code == 409 and busy.json()["error"]["code"] == "not_idle"
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert len(await tokens(client)) == 6

    serve(llm, use)


def test_a_start_that_is_not_over_cannot_sleep(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "start_progress", property(lambda llm: "compiling 1 of 4"))

    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "serving", "start": "compiling 1 of 4"})
        refused = await client.post("/sleep")
        assert refused.status_code == 409 and "compiling 1 of 4" in refused.json()["error"]["message"]
        assert not service.is_asleep

    serve(llm, use)


def test_without_the_flag_there_are_no_such_paths(llm: LLM) -> None:
    async def use(client: httpx.AsyncClient, service: GenerationService) -> None:
        assert (await client.post("/sleep")).status_code == 404
        assert (await client.post("/wake_up")).status_code == 404
        assert (await client.get("/is_sleeping")).status_code == 404

    serve(llm, use, enable_sleep_mode=False)
