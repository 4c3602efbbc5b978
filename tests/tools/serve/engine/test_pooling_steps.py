from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from piecegraph.runner.pooling.engine import OutputRules, PooledOutput, PoolingEngine
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.pooling.step import Text
from piecegraph.runner.pooling.task import PoolingTask
from piecegraph.tools.serve.engine.engine_thread import EngineStopped, EngineThread, WaitedTooLong
from piecegraph.tools.serve.engine.pooling_steps import PoolingRequest, PoolingSteps


@dataclass
class FakeRunner:
    """A runner whose row of a text is its first token. It remembers the size of each batch."""

    num_failures: int = 0  # of the first batches
    may_run: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    batches: list[int] = field(default_factory=list)
    texts: Sequence[Text] = ()

    def execute_model(self, texts: Sequence[Text]) -> None:
        self.has_begun.set()
        assert self.may_run.wait(30)
        if len(self.batches) < self.num_failures:
            self.batches.append(0)
            raise RuntimeError("now and then")
        self.batches.append(len(texts))
        self.texts = texts

    def pool(self) -> torch.Tensor:
        return torch.tensor([[float(text.token_ids[0])] for text in self.texts])

    def reset(self) -> None:
        self.texts = ()


def steps_over(runner: FakeRunner, *, may_run: bool = True) -> PoolingSteps:
    if may_run:
        runner.may_run.set()
    rules = OutputRules(task=PoolingTask.EMBED, size=1, normalize=False, matryoshka=None, activation=None)
    engine = PoolingEngine(
        runner=runner,  # type: ignore[arg-type]  # a fake
        rules=rules,
        max_model_len=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        vocab_size=100,
        num_token_types=0,
    )
    return PoolingSteps(engine)


def request(token: int) -> PoolingRequest:
    return PoolingRequest(text=Text(token_ids=[token]), params=PoolingParams())


def thread_over(steps: PoolingSteps, max_wait_s: float | None = None) -> EngineThread[PoolingRequest, PooledOutput]:
    thread = EngineThread(steps, device=torch.device("cpu"), max_wait_s=max_wait_s)
    thread.start()
    return thread


def test_texts_of_different_requests_share_a_step() -> None:
    """As many as fit; one that is dropped before takes no place."""
    runner = FakeRunner()
    steps = steps_over(runner)
    for token in range(7):
        steps.add(str(token), request(token))
    steps.abort("2")
    assert steps.is_waiting("0")
    assert not steps.is_waiting("2")
    assert {one.request_id: one.outputs.data.item() for one in steps.step()} == {"0": 0, "1": 1, "3": 3, "4": 4}
    assert [one.request_id for one in steps.step()] == ["5", "6"]
    assert runner.batches == [4, 2]
    assert not steps.has_unfinished


def test_each_coroutine_gets_its_row() -> None:
    """Also where the first two steps fail: their texts are run again."""
    runner = FakeRunner(num_failures=2)
    thread = thread_over(steps_over(runner))

    async def use() -> list[float]:
        streams = [thread.submit(str(token), request(token)) for token in range(9)]
        return [(await stream.get()).outputs.data.item() for stream in streams]

    assert asyncio.run(use()) == list(range(9))
    assert sum(runner.batches) == 9
    assert thread.stop(10)


def test_a_text_that_waits_too_long_is_dropped() -> None:
    """Its coroutine is told, and the texts that follow are run."""
    runner = FakeRunner(num_failures=1)
    thread = thread_over(steps_over(runner, may_run=False), max_wait_s=0.02)

    async def use() -> None:
        waits = thread.submit("0", request(0))
        await asyncio.to_thread(runner.has_begun.wait, 30)
        await asyncio.sleep(0.05)
        runner.may_run.set()  # the step fails, and before the next one the time is over
        with pytest.raises(WaitedTooLong, match=r"0\.02 s"):
            await waits.get()
        assert (await thread.submit("1", request(1)).get()).outputs.data.item() == 1

    asyncio.run(use())
    assert thread.stop(10)


def test_a_shutdown_ends_what_waits() -> None:
    """The texts of the step that runs get their rows, and the others `EngineStopped`; nobody waits for ever."""
    runner = FakeRunner()
    thread = thread_over(steps_over(runner, may_run=False))

    async def use() -> None:
        first = thread.submit("0", request(0))
        await asyncio.to_thread(runner.has_begun.wait, 30)
        waits = [thread.submit(str(token), request(token)) for token in range(1, 6)]
        stopping = asyncio.ensure_future(asyncio.to_thread(thread.stop, 30))
        await asyncio.sleep(0.01)
        runner.may_run.set()
        assert await stopping
        assert (await first.get()).outputs.data.item() == 0
        for stream in waits:
            with pytest.raises(EngineStopped, match="shutting down"):
                await stream.get()
        with pytest.raises(EngineStopped):
            thread.submit("9", request(9))

    asyncio.run(use())
