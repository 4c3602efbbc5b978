"""The front door over engines that a test plays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from threading import Thread
from typing import Any, cast

import pytest
import torch

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import RequestOutputKind, SamplingParams
from piecegraph.runner.data_parallel.engine_program import EngineFacts, NewRequest, StepNews
from piecegraph.runner.data_parallel.front_door import FrontDoor
from piecegraph.runner.output.outbox import Outbox
from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)


def stats(num_running: int = 0, drafts: int | None = None) -> SchedulerStats:
    speculation = None
    if drafts is not None:
        speculation = SpeculationStats(
            num_verifications=1, num_draft_tokens=drafts, num_accepted_tokens=1, num_accepted_by_position=(1, 0)
        )
    return SchedulerStats(
        num_running=num_running,
        num_waiting=0,
        num_free_blocks=5,
        num_blocks=10,
        num_prefix_queries=4,
        num_prefix_hits=2,
        num_preemptions=1,
        speculation=speculation,
    )


class Played:
    """The processes of two engines, whose messages the test writes."""

    num_engines = 2
    in_lockstep = False

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, tuple[Any, ...]]] = []
        self.news: deque[tuple[int, int, StepNews]] = deque()
        self.busy: tuple[int, ...] = ()
        self.answer: RequestOutput | None = None
        self.interrupts = 0
        self._num_messages = 0

    def say(self, engine: int, *outputs: RequestOutput, scheduled: tuple[str, ...] = ()) -> None:
        self._num_messages += 1
        news = StepNews(
            outputs=list(outputs),
            scheduled=scheduled,
            stats=stats(engine + 1),
            num_output_tokens=10 * (engine + 1),
            num_forced_tokens=3 * (engine + 1),
        )
        self.news.append((self._num_messages, engine, news))

    def send(self, engine: int, name: str, *values: Any) -> None:
        self.sent.append((engine, name, values))

    def next_news(self, busy: tuple[int, ...]) -> tuple[int, int, StepNews]:
        self.busy = busy
        return self.news[0]

    def has_news(self) -> bool:
        return bool(self.news)

    def drop_news(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.news.popleft()

    def ask(self, engines: Sequence[int], take_news: Callable[[], None], name: str, *values: Any) -> list[Any]:
        self.send(engines[0], name, *values)
        return [self.answer for _ in engines]

    @property
    def requests(self) -> list[tuple[int, NewRequest]]:
        return [(engine, values[0]) for engine, name, values in self.sent if name == "add"]


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def door(played: Played) -> FrontDoor:
    facts = EngineFacts(
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=frozenset({2}),
        embedding_size=None,
        sampling_defaults={},
        dtype=torch.float32,
        notes=(),
        report=cast(Any, None),
        selfcheck=None,
        stats=stats(),
        adapted=None,
    )
    config = EngineConfig(source=ModelSource(model="m"), data_parallel_size=2, seed=3)
    return FrontDoor(config=config, processes=cast(Any, played), facts=[facts, facts], tokenizer=None)


def output(request_id: str, *tokens: int, finished: bool = False) -> RequestOutput:
    reason = "length" if finished else None
    completion = CompletionOutput(index=0, text="", token_ids=list(tokens), finish_reason=reason)
    return RequestOutput(
        request_id=request_id, prompt=None, prompt_token_ids=[], finished=finished, outputs=[completion]
    )


def test_a_request_goes_to_the_engine_with_the_fewest_completions(door: FrontDoor, played: Played) -> None:
    door.add_request("a", [1], SamplingParams(n=3, temperature=1.0))
    door.add_request("b", [1], SamplingParams())
    door.add_request("c", [1], SamplingParams())
    assert [(engine, new.request_id) for engine, new in played.requests] == [(0, "a"), (1, "b"), (1, "c")]
    assert door.loads == (3, 2)
    played.say(0, output("a", 5, finished=True))
    assert door.step()
    door.add_request("d", [1], SamplingParams())
    assert played.requests[-1][0] == 0
    assert door.num_unfinished == 3


def test_seeds_are_drawn_in_the_order_of_arrival(door: FrontDoor, played: Played) -> None:
    """As an engine of one process draws them, wherever requests run."""
    expected = Random(3)
    for name in "ab":
        door.add_request(name, [1], SamplingParams())
    door.add_request("c", [1], SamplingParams(seed=5))
    found = [new.params.seed for _, new in played.requests]
    assert found == [expected.getrandbits(63), expected.getrandbits(63), 5]


def test_outputs_are_whole_or_new_as_their_caller_wants(door: FrontDoor, played: Played) -> None:
    """Several messages before a caller looks are one whole output, or as many parts."""
    whole, parts = Outbox(), Outbox()
    door.add_request("w", [1, 2], SamplingParams(), prompt="Hi", outbox=whole)
    door.add_request("p", [1], DELTA, outbox=parts)
    played.say(0, output("w", 5))
    played.say(1, output("p", 7))
    played.say(0, output("w", 6))
    played.say(1, output("p", 8, finished=True))
    (found,) = door.step(whole)
    assert found.outputs[0].token_ids == [5, 6]
    assert (found.prompt, found.prompt_token_ids) == ("Hi", [1, 2])
    assert [list(one.outputs[0].token_ids) for one in door.collect(parts)] == [[7], [8]]
    assert "p" not in door
    assert "w" in door
    assert door.collect(whole) == []


def test_a_message_that_an_interrupt_did_not_let_go_counts_once(door: FrontDoor, played: Played) -> None:
    door.add_request("w", [1], SamplingParams())
    door.add_request("p", [1], DELTA)
    played.say(0, output("w", 5))
    played.say(1, output("p", 7))
    for _ in range(2):
        played.interrupts = 1
        with pytest.raises(KeyboardInterrupt):
            door.step()
    found = door.step()
    assert {one.request_id: list(one.outputs[0].token_ids) for one in found} == {"w": [5], "p": [7]}
    assert not played.news


def test_an_aborted_request_returns_what_it_has(door: FrontDoor, played: Played) -> None:
    door.add_request("a", [1], SamplingParams())
    played.say(0, output("a", 5))
    door.step()
    played.answer = output("a", 6, finished=True)
    final = door.abort("a")
    assert final is not None
    assert final.outputs[0].token_ids == [5, 6]
    assert door.abort("a") is None
    assert not door.has_unfinished
    assert played.sent[-1] == (0, "abort", ("a",))


def test_engines_with_requests_have_to_show_life(door: FrontDoor, played: Played) -> None:
    door.add_request("a", [1], SamplingParams())
    assert door.is_waiting("a")
    played.say(0, scheduled=("a",))
    door.step()
    assert played.busy == (0,)
    assert not door.is_waiting("a")


def test_stats_are_of_all_engines(door: FrontDoor, played: Played) -> None:
    door.add_request("a", [1], SamplingParams())
    played.say(0)
    played.say(1)
    door.step()
    assert door.stats == SchedulerStats(
        num_running=3,
        num_waiting=0,
        num_free_blocks=10,
        num_blocks=20,
        num_prefix_queries=8,
        num_prefix_hits=4,
        num_preemptions=2,
    )
    assert door.num_output_tokens == 30 and door.num_forced_tokens == 9
    door._stats = [stats(drafts=3), stats(drafts=4)]
    assert door.stats.speculation == SpeculationStats(
        num_verifications=2, num_draft_tokens=7, num_accepted_tokens=2, num_accepted_by_position=(2, 0)
    )


def test_what_cannot_run_is_refused_here(door: FrontDoor, played: Played) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        door.add_request("a", [], SamplingParams())
    door.add_request("a", [1], SamplingParams())
    with pytest.raises(RequestError, match="'a' is already running"):
        door.add_request("a", [1], SamplingParams())
    with pytest.raises(UsageError, match="in processes of their own, and scheduler with them"):
        _ = door.scheduler
    with pytest.raises(UsageError, match="and requests with them"):
        _ = door.requests
    assert len(played.sent) == 1


def test_engines_in_lockstep_are_all_woken_by_each_request(door: FrontDoor, played: Played) -> None:
    """Also where an interrupt came between two messages; then all have to show life, as a step of one needs all.

    The request comes first: woken without it, its engine and all others would find nothing to do, and sleep.
    """
    played.in_lockstep = True
    door.add_request("a", [1, 2], SamplingParams())
    assert [(engine, name, values[0] if name == "wake" else None) for engine, name, values in played.sent] == [
        (0, "add", None),
        (0, "wake", 1),
        (1, "wake", 1),
    ]
    played.sent.clear()
    door._num_told[1] = 0  # the message was not sent
    played.say(0, output("a", 5))
    door.step()
    assert played.sent == [(1, "wake", (1,))]
    assert list(played.busy) == [0, 1]


def test_a_second_thread_is_refused_while_one_reads_news(
    door: FrontDoor, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The news that one takes may be the answer to the other, who would wait for ever."""
    refused: list[Exception | None] = []

    def call(use: Callable[[], object]) -> None:
        try:
            use()
        except UsageError as error:
            refused.append(error)

    def next_news(busy: tuple[int, ...]) -> Any:
        for use in (door.step, lambda: door.abort("a"), door.reset_prefix_cache):
            thread = Thread(target=call, args=(use,))
            thread.start()
            thread.join()
        return played.news[0]

    monkeypatch.setattr(played, "next_news", next_news)
    door.add_request("a", [5], DELTA)
    played.say(0)
    door.step()
    assert [str(error).partition(";")[0] for error in refused] == ["another thread is using the engines"] * 3
    monkeypatch.undo()
    played.say(0)
    assert door.step() == []
