"""An exception at any point of the engine loses nothing: whoever calls on gets what an undisturbed run gives.

The seams are not listed: a trace function raises at the k-th line that runs in the runner's sources, for many k, so
that lines written later are tested, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from string import ascii_letters
from types import FrameType
from typing import Any

import pytest

import piecegraph.runner
from piecegraph import SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.engine.engine import Engine
from tests.rounds import ROUNDS
from tests.runner.logprob_values import values_of
from tests.runner.test_graphs import load

SOURCES = str(Path(piecegraph.runner.__file__).parent)
MAX_CALLS = 400
"""The largest number of calls of `step` in a run; an undisturbed run takes about 30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    prompt: list[int]
    params: SamplingParams
    is_final_only: bool = False
    arrives_at: int = 0  # calls of `step` before it
    aborted_at: int | None = None


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, **{"temperature": 1.2, "max_tokens": 9, "ignore_eos": True, **options})


ASKS = {
    "logged": Ask(prompt=[7, 8, 9, 10, 11], params=sampled(1, logprobs=2)),
    "prompt-logged": Ask(prompt=[*range(20, 43)], params=sampled(2, prompt_logprobs=1, max_tokens=5)),
    "stopped": Ask(prompt=[7, 8, 9, 10, 12], params=sampled(3, stop=[*ascii_letters], max_tokens=20), arrives_at=2),
    "two": Ask(prompt=[7, 8, 9, 10, 13, 14], params=sampled(4, n=2, max_tokens=8), is_final_only=True),
    "quiet": Ask(prompt=[30, 31], params=sampled(5, max_tokens=20), is_final_only=True),
    "ends": Ask(prompt=[50, 51, 52], params=sampled(6, ignore_eos=False, stop_token_ids=[*range(3, 60)])),
    "aborted": Ask(prompt=[60] * 9, params=sampled(7, max_tokens=30), arrives_at=3, aborted_at=8),
    "late": Ask(
        prompt=[7, 8, 9, 10, 90], params=sampled(8, logprobs=0, max_tokens=4), is_final_only=True, arrives_at=9
    ),
}


class Fault:
    """Raises `error` at each of `at`: the lines of the runner's sources run since the one before."""

    def __init__(self, error: BaseException | None, *at: int) -> None:
        self.error, self._at = error, list(at)
        self.num_lines = 0
        self.places: list[str] = []

    def arm(self) -> None:
        sys.settrace(self._on_call)

    def disarm(self) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event != "line" or _has_handed_over(frame):
            return self._on_line
        self.num_lines += 1
        if self._at and self.num_lines == self._at[0]:
            self._at.pop(0)
            self.num_lines = 0
            assert self.error is not None
            self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
            raise self.error
        return self._on_line


def _has_handed_over(frame: FrameType) -> bool:
    """Return whether `collect` has only to return: no signal is handled after its last store."""
    return frame.f_code is Engine.collect.__code__ and "outputs" in frame.f_locals


@dataclass(slots=True)
class Run:
    """The outputs for `ASKS`."""

    finished: dict[str, RequestOutput] = field(default_factory=dict)
    streamed: dict[str, list[list[int]]] = field(default_factory=dict)
    untaken: list[RequestOutput] = field(default_factory=list)  # returned, and not read yet
    num_faults: int = 0

    def take(self) -> None:
        """Read what was returned; reading may be interrupted like anything else."""
        while self.untaken:
            output = self.untaken[0]
            assert output.request_id not in self.finished, f"{output.request_id} was told after its end"
            tokens = [list(one.token_ids) for one in output.outputs]
            for before, now in zip(self.streamed.get(output.request_id, []), tokens, strict=False):
                assert now[: len(before)] == before, "a token that was told has changed"
            self.streamed[output.request_id] = tokens
            if output.finished:
                self.finished[output.request_id] = output
            del self.untaken[0]


def run(engine: Engine, fault: Fault, asks: Mapping[str, Ask] = ASKS) -> Run:
    """Serve all of `asks`, and continue after every error."""
    found = Run()
    waiting = dict(asks)
    to_abort = {name: ask.aborted_at for name, ask in asks.items() if ask.aborted_at is not None}
    for num_calls in range(MAX_CALLS):
        for name, ask in [(name, ask) for name, ask in waiting.items() if ask.arrives_at <= num_calls]:
            while name in waiting:
                _attempt(found, fault, partial(_add, engine, waiting, name, ask))
        for name in [name for name, at in to_abort.items() if at == num_calls]:
            while name in to_abort and name not in found.finished:
                _attempt(found, fault, partial(_abort, engine, found, to_abort, name))
                _take(found, fault)
        if not engine.has_unfinished and not waiting:
            break
        _attempt(found, fault, lambda: found.untaken.extend(engine.step()))
        _take(found, fault)
    else:
        raise AssertionError("requests that never end")
    engine.step()  # what is in flight for requests that have ended
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"
    assert not engine.requests
    return found


def _take(found: Run, fault: Fault) -> None:
    while found.untaken:
        _attempt(found, fault, found.take)


def _attempt(found: Run, fault: Fault, call: Callable[[], object]) -> None:
    fault.arm()
    try:
        call()
    except (KeyboardInterrupt, MemoryError, RuntimeError, RequestError) as error:
        if fault.error not in (error, error.__cause__):  # an error in copying parameters is raised as a RequestError
            raise
        found.num_faults += 1
    finally:
        fault.disarm()


def _add(engine: Engine, waiting: dict[str, Ask], name: str, ask: Ask) -> None:
    if name not in engine:  # it is there if a second fault came while the first was undone
        engine.add_request(name, ask.prompt, ask.params, is_final_only=ask.is_final_only)
    del waiting[name]


def _abort(engine: Engine, found: Run, to_abort: dict[str, Any], name: str) -> None:
    output = engine.abort(name)
    to_abort.pop(name)
    if output is not None:
        found.untaken.append(output)


def assert_equal(found: Run, expected: Run, error: BaseException, places: list[str]) -> None:
    """Tokens, text, log probabilities and ends; one that ended with an error of its own has a beginning of its own."""
    assert found.finished.keys() == expected.finished.keys(), places
    num_failed = 0
    for name, output in found.finished.items():
        for one, other in zip(output.outputs, expected.finished[name].outputs, strict=True):
            if one.finish_reason == "error":
                assert type(error) is RuntimeError and one.error == "RuntimeError: on purpose", places
                num_failed += 1
            elif other.finish_reason == "abort":  # how far it came depends on how often it was computed
                assert one.finish_reason == "abort"
            else:
                assert (one.finish_reason, one.stop_reason, one.error) == (other.finish_reason, other.stop_reason, None)
                assert (one.token_ids, one.text) == (other.token_ids, other.text), (name, places)
                assert (one.logprobs is None) == (other.logprobs is None)
                for row, other_row in zip(one.logprobs or (), other.logprobs or (), strict=True):
                    assert values_of(row) == pytest.approx(values_of(other_row), abs=1e-4), (name, places)
                if other.cumulative_logprob is not None:
                    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            if one.finish_reason != "error":
                prompt, other_prompt = output.prompt_logprobs, expected.finished[name].prompt_logprobs
                for at, other_at in zip(prompt or (), other_prompt or (), strict=True):
                    assert (at is None) == (other_at is None), (name, places)
                    assert values_of(at or {}) == pytest.approx(values_of(other_at or {}), abs=1e-4), (name, places)
    assert num_failed <= max(one.params.n for one in ASKS.values()), places


@pytest.fixture(scope="module", params=[0, 1], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[Engine]:
    sizes = {"max_model_len": 48, "block_size": 4, "num_kv_blocks": 12, "max_num_seqs": 5, "max_num_batched_tokens": 16}
    with load(llama_dir, async_scheduling=bool(request.param), skip_tokenizer_init=False, **sizes) as llm:
        yield llm.engine


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> tuple[Run, int]:
    """Return the outputs of a run without a fault, and the number of lines that it executes."""
    fault = Fault(None)
    before = engine.stats.num_preemptions
    found = run(engine, fault)
    reasons = {name: [one.finish_reason for one in output.outputs] for name, output in found.finished.items()}
    assert reasons["stopped"] == ["stop"] and reasons["ends"] == ["stop"] and reasons["aborted"] == ["abort"], reasons
    assert engine.stats.num_preemptions > before, "nobody had to give way"
    return found, fault.num_lines


ERRORS = [KeyboardInterrupt("on purpose"), MemoryError("on purpose"), RuntimeError("on purpose")]


def inject(
    engine: Engine,
    undisturbed: tuple[Run, int],
    error: BaseException,
    num_faults: int,
    seed: int,
    asks: Mapping[str, Ask] = ASKS,
) -> None:
    expected, num_lines = undisturbed
    random = Random(seed)
    bounds = [num_lines * part // num_faults for part in range(num_faults + 1)]
    for start, end in itertools.pairwise(bounds):
        # The second fault, if any, comes soon: while the first is being recovered from.
        at = [random.randrange(start, end) + 1, *random.choice([[], [random.randrange(1, 120)]])]
        fault = Fault(error, *at)
        found = run(engine, fault, asks)
        assert_equal(found, expected, error, fault.places)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_fault_anywhere_loses_nothing(engine: Engine, undisturbed: tuple[Run, int], error: BaseException) -> None:
    inject(engine, undisturbed, error, 12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_many_faults_lose_nothing(
    engine: Engine, undisturbed: tuple[Run, int], error: BaseException, seed: int
) -> None:
    inject(engine, undisturbed, error, 75, seed=seed + 2)


class Broken:
    """A detokenizer that fails at its third token, or at the end."""

    text = "so far"

    def __init__(self, *, at_end: bool) -> None:
        self._at_end, self._num_tokens = at_end, 0

    def append(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._num_tokens == 3 and not self._at_end:
            raise ValueError("no such token")

    def add_unread(self, token_ids: list[int]) -> None:
        """Ends with the tokens."""

    def finish(self) -> None:
        if self._at_end:
            raise ValueError("no such end")

    def settled_text(self) -> str:
        return self.text


@pytest.mark.parametrize("is_final_only", [False, True])
@pytest.mark.parametrize("at_end", [False, True])
def test_a_request_whose_own_processing_fails_ends_alone(engine: Engine, at_end: bool, is_final_only: bool) -> None:
    """Its error is told with what it had; no other request notices."""
    params = sampled(1, max_tokens=6)
    engine.add_request("alone", [7, 8, 9], params)
    alone = None
    while engine.has_unfinished:
        for output in engine.step():
            alone = output
    assert alone is not None
    for name in ("broken", "whole"):
        engine.add_request(name, [7, 8, 9], params, is_final_only=is_final_only and name == "broken")
    (completion,) = engine._processor.prompt("broken").completions
    completion.detokenizer = Broken(at_end=at_end or is_final_only)  # type: ignore[assignment]
    finished = {}
    for _ in range(MAX_CALLS):
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]
        if not engine.has_unfinished:
            break
    assert finished["whole"] == alone.outputs[0]
    broken = finished["broken"]
    assert broken.finish_reason == "error" and broken.stop_reason is None
    assert broken.error == f"ValueError: no such {'end' if at_end or is_final_only else 'token'}"
    assert broken.token_ids == alone.outputs[0].token_ids[: len(broken.token_ids)]
    assert len(broken.token_ids) == (6 if at_end or is_final_only else 3)
    engine.step()
