from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from piecegraph.errors import RequestError, UsageError, WorkerError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.prompts.tokenize import TokenizedPrompt
from piecegraph.tools.serve.engine.engine_thread import (
    EngineStopped,
    EngineThread,
    StepsFailed,
    WaitedTooLong,
)
from piecegraph.tools.serve.engine.generation_steps import GenerationRequest, GenerationSteps

REQUEST = GenerationRequest(prompt=TokenizedPrompt(text="a", token_ids=[5]), params=SamplingParams())


REFUSALS: dict[str, Exception] = {
    "refused": RequestError("a reason"),
    "asleep": UsageError("the engine sleeps."),
    "unforeseen": ZeroDivisionError("of no kind of ours"),
}


@dataclass
class FakeRequest:
    scheduled_ts: float = 0.0


@dataclass
class FakeEngine:
    """An engine whose steps do what `on_step` says, and which remembers who called it."""

    on_step: Callable[[FakeEngine], list[RequestOutput]]
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    num_steps: int = 0

    def has_unfinished_for(self, outbox: object) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, *arguments: Any, **options: Any) -> None:
        self.threads.add(threading.get_ident())
        if request_id in REFUSALS:
            raise REFUSALS[request_id]
        self.requests[request_id] = FakeRequest()

    def is_waiting(self, request_id: str) -> bool:
        self.threads.add(threading.get_ident())
        return request_id in self.requests and not self.requests[request_id].scheduled_ts

    def step(self, outbox: object) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        return self.on_step(self)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        self.aborted.append(request_id)
        self.requests.pop(request_id, None)


def output(request_id: str, *, finished: bool) -> RequestOutput:
    return RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[5], finished=finished, outputs=[])


def finish_all(engine: FakeEngine) -> list[RequestOutput]:
    outputs = [output(request_id, finished=True) for request_id in engine.requests]
    engine.requests.clear()
    return outputs


def nothing(engine: FakeEngine) -> list[RequestOutput]:
    return []


def thread_over(engine: FakeEngine, **options: Any) -> EngineThread[GenerationRequest, RequestOutput]:
    thread = EngineThread(GenerationSteps(engine), device=torch.device("cpu"), **options)  # type: ignore[arg-type]  # a fake
    thread.start()
    return thread


def test_outputs_reach_their_coroutines() -> None:
    """One thread alone calls the engine; what it refuses is raised by the stream of that request."""
    engine = FakeEngine(finish_all)
    thread = thread_over(engine)

    async def use() -> list[str]:
        streams = [thread.submit(name, REQUEST) for name in ("a", "b")]
        refused = thread.submit("refused", REQUEST)
        with pytest.raises(RequestError, match="a reason"):
            await refused.get()
        return [(await stream.get()).request_id for stream in streams]

    assert asyncio.run(use()) == ["a", "b"]
    assert thread.stop(10)
    assert len(engine.threads) == 1
    assert engine.threads != {threading.get_ident()}


def test_idle_moments_go_on_with_the_start_until_it_is_over() -> None:
    """A request that comes meanwhile is run before the next one of them."""
    engine = FakeEngine(finish_all)
    left, is_over = [0.0, 0.0, 0.01, 0.0], threading.Event()

    def use_idle_moment() -> float | None:
        engine.threads.add(threading.get_ident())
        if left:
            return left.pop()
        is_over.set()
        return None

    steps = GenerationSteps(engine, use_idle_moment)  # type: ignore[arg-type]  # a fake
    thread = EngineThread(steps, device=torch.device("cpu"))
    thread.start()
    assert is_over.wait(60)

    async def use() -> str:
        return (await thread.submit("a", REQUEST).get()).request_id

    assert asyncio.run(use()) == "a"
    assert thread.stop(10)
    assert len(engine.threads) == 1


def test_an_aborted_request_takes_part_in_no_further_step() -> None:
    """The engine is told before its next step; the stream gets nothing more."""
    engine = FakeEngine(lambda engine: [output(name, finished=False) for name in engine.requests])
    thread = thread_over(engine)

    async def use() -> None:
        stream = thread.submit("a", REQUEST)
        await stream.get()
        thread.abort(stream)
        thread.abort(stream)
        while not engine.aborted:
            await asyncio.sleep(0.001)

    asyncio.run(use())
    assert engine.aborted == ["a"]
    assert thread.stop(10)


def test_a_request_that_waits_too_long_is_ended() -> None:
    """One that runs is not."""

    def run_the_first(engine: FakeEngine) -> list[RequestOutput]:
        engine.requests["runs"].scheduled_ts = 1.0
        return finish_all(engine) if engine.aborted else []

    engine = FakeEngine(run_the_first)
    thread = thread_over(engine, max_wait_s=0.05)

    async def use() -> None:
        runs, waits = (thread.submit(name, REQUEST) for name in ("runs", "waits"))
        with pytest.raises(WaitedTooLong, match=r"0\.05 s"):
            await waits.get()
        assert (await runs.get()).finished

    asyncio.run(use())
    assert engine.aborted == ["waits"]
    assert thread.stop(10)


def test_a_step_that_fails_is_tried_again() -> None:
    def fail_twice(engine: FakeEngine) -> list[RequestOutput]:
        if engine.num_steps < 3:
            raise RuntimeError("now and then")
        return finish_all(engine)

    thread = thread_over(FakeEngine(fail_twice))

    async def use() -> bool:
        return (await thread.submit("a", REQUEST).get()).finished

    assert asyncio.run(use())
    assert thread.is_alive
    assert thread.stop(10)


def test_whatever_the_engine_raises_for_a_request_ends_that_request_alone() -> None:
    engine = FakeEngine(finish_all)
    thread = thread_over(engine)

    async def use() -> None:
        for request_id, error in REFUSALS.items():
            with pytest.raises(type(error), match=str(error)):
                await thread.submit(request_id, REQUEST).get()
        assert (await thread.submit("a", REQUEST).get()).finished

    asyncio.run(use())
    assert thread.is_alive
    assert thread.stop(10)


def test_an_abort_that_fails_ends_nothing_else() -> None:
    engine = FakeEngine(lambda engine: [output(name, finished=False) for name in engine.requests])
    thread = thread_over(engine)

    def fail(request_id: str) -> None:
        engine.requests.pop(request_id)
        raise UsageError("another thread is using the engine.")

    engine.abort = fail  # type: ignore[method-assign]

    async def use() -> str:
        stream = thread.submit("a", REQUEST)
        await stream.get()
        thread.abort(stream)
        return (await thread.submit("b", REQUEST).get()).request_id

    assert asyncio.run(use()) == "b"
    assert thread.is_alive
    assert thread.stop(10)


def test_a_request_whose_steps_keep_failing_ends_without_the_others() -> None:
    """The newest one ends, which has probably caused it; the engine serves on."""

    def fail_with_the_last(engine: FakeEngine) -> list[RequestOutput]:
        if "b" in engine.requests:
            raise RuntimeError("of b")
        return [] if len(engine.requests) == 1 and not engine.aborted else finish_all(engine)

    engine = FakeEngine(fail_with_the_last)
    thread = thread_over(engine)

    async def use() -> bool:
        first = thread.submit("a", REQUEST)
        with pytest.raises(StepsFailed, match="3 steps in a row"):
            await thread.submit("b", REQUEST).get()
        return (await first.get()).finished

    assert asyncio.run(use())
    assert engine.aborted == ["b"] and thread.is_alive
    assert thread.stop(10)


def test_requests_that_no_failed_step_has_run_go_on() -> None:
    """The newest one waits, so it has caused nothing; one that comes between two failures has not either."""

    def fail_with_the_bad(engine: FakeEngine) -> list[RequestOutput]:
        if "bad" in engine.requests:
            raise RuntimeError("of bad")
        return finish_all(engine) if {"good", "waits"} <= set(engine.requests) else []

    engine = FakeEngine(fail_with_the_bad)
    engine.is_waiting = lambda request_id: request_id == "waits"  # type: ignore[method-assign]
    thread = thread_over(engine)

    async def use() -> list[bool]:
        good, bad, waits = (thread.submit(name, REQUEST) for name in ("good", "bad", "waits"))
        with pytest.raises(StepsFailed):
            await bad.get()
        return [(await each.get()).finished for each in (good, waits)]

    assert asyncio.run(use()) == [True, True]
    assert engine.aborted == ["bad"]
    assert thread.stop(10)


def test_requests_whose_steps_always_fail_do_not_end_the_engine() -> None:
    """Each is ended, however many come one after another."""

    def fail(engine: FakeEngine) -> list[RequestOutput]:
        raise RuntimeError("always")

    thread = thread_over(FakeEngine(fail))

    async def use() -> None:
        for number in range(5):
            with pytest.raises(StepsFailed):
                await thread.submit(str(number), REQUEST).get()

    asyncio.run(use())
    assert thread.is_alive
    assert thread.stop(10)


@pytest.mark.parametrize("error", [WorkerError("rank 1 is lost"), torch.AcceleratorError("an illegal address")])
def test_an_engine_that_has_lost_a_rank_or_its_device_is_given_up(error: Exception) -> None:
    """The owner is told at once, and no further request is taken."""

    def fail(engine: FakeEngine) -> list[RequestOutput]:
        raise error

    told: list[BaseException] = []
    engine = FakeEngine(fail)
    thread = thread_over(engine, on_failure=told.append)

    async def use() -> None:
        with pytest.raises(EngineStopped, match=type(error).__name__):
            await thread.submit("c", REQUEST).get()
        with pytest.raises(EngineStopped):
            thread.submit("d", REQUEST)

    asyncio.run(use())
    assert told == [error] and engine.num_steps == 1
    assert not thread.is_alive


def test_stopping_ends_what_runs() -> None:
    engine = FakeEngine(nothing)
    thread = thread_over(engine)

    async def use() -> None:
        stream = thread.submit("a", REQUEST)
        while not engine.num_steps:
            await asyncio.sleep(0.001)
        assert thread.stop(10)
        with pytest.raises(EngineStopped, match="shutting down"):
            await stream.get()

    asyncio.run(use())
    assert not engine.requests


def test_a_call_runs_in_the_engines_thread() -> None:
    """Its result and its error come back, the engine goes on, and after the end it is refused."""

    async def run() -> None:
        engine = FakeEngine(on_step=lambda engine: [])
        thread = EngineThread(GenerationSteps(engine), device=torch.device("cpu"))  # type: ignore[arg-type]
        thread.start()
        assert await thread.call(threading.get_ident) == thread._thread.ident
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        assert thread.is_alive and await thread.call(lambda: "again") == "again"
        assert await asyncio.to_thread(thread.stop, 60)
        with pytest.raises(EngineStopped):
            await thread.call(lambda: "never")

    asyncio.run(run())
