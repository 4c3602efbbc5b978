"""The engine over random lives of requests: arrivals, chunks, aborts, preemptions, failing steps, forced modes.

Here each token is held against transformers alone, sampling options and noise included, each step's work against
what a request still needs, and what ran in company is run again alone. Over graphs that are recorded and over none;
the `gpu` test does the same with CUDA graphs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.output.async_output import AsyncOutput, ModelRunnerOutput
from piecegraph.runner.sampling.options.grammar import GrammarOutput
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from tests.runner.engine_model import (
    AloneModel,
    assert_answer,
    assert_ends_where_it_must,
    assert_logprobs,
    right_tokens,
)
from tests.runner.test_graphs import load

EOS = 1
BLOCK_SIZE = 4
MAX_NUM_SEQS = 5
MAX_STEP_TOKENS = 16
MAX_MODEL_LEN = 48
TINY: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 14,  # hardly more than one long request
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": MAX_STEP_TOKENS,
}
MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)
FAILURES = ("before", "after", "output")
"""A step raises before the model runs, after it, or when its output is asked for."""
PREFIXES = ([7, 8, 9, 10] * 10, [7, 8, 9, 10] * 2 + [40, 41, 42, 43] * 8, list(range(100, 140)))

ALL_ASK: Mapping[str, Sequence[Any]] = {
    "prefix": range(len(PREFIXES)),
    "num_shared": (*range(25), 36, 40),  # with the longest the model's length ends an answer
    "first_of_tail": range(3, 240),
    "num_tail": range(1, 6),
    "priority": (0, 0, 1, 2),
    "cache_salt": ("", "", "", "x"),
    "is_final_only": (False, False, True),
    "max_tokens": range(1, 13),
    "temperature": (0.0, 0.0, 0.7, 1.3),
    "seed": (None, 0, 17, 2**40 + 1, 2**63 - 1),
    "ignore_eos": (False, True),
    "n": (1, 1, 1, 2),
    "is_plain": (False, True),
}
SOME_ASK: Mapping[str, Sequence[Any]] = {
    "top_k": (0, 0, 3, 20),
    "top_p": (1.0, 1.0, 0.6, 0.9),
    "min_p": (0.0, 0.0, 0.0, 0.05),
    "repetition_penalty": (1.0, 1.0, 1.3, 0.8),
    "presence_penalty": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, 0.0, -0.5),
    "logit_bias": (None, None, {50: 4.0, 51: 4.0, EOS: 3.0}),
    "min_tokens": (0, 0, 3),
    "stop_token_ids": ((), (), tuple(range(3, 90))),
    "logprobs": (None, None, 0, 2, -1),
    "prompt_logprobs": (None, None, None, None, 0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as a caller makes it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    is_final_only: bool = False

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Ask:
        """From one value for each name of `ALL_ASK` and `SOME_ASK`; a plain one leaves out the latter."""
        options = {} if chosen["is_plain"] else {name: chosen[name] for name in SOME_ASK}
        if options:
            options["min_tokens"] = min(options["min_tokens"], chosen["max_tokens"])
        tail = [chosen["first_of_tail"] + 3 * i for i in range(chosen["num_tail"])]
        return cls(
            prompt=(*PREFIXES[chosen["prefix"]][: chosen["num_shared"]], *tail),
            params=SamplingParams(
                max_tokens=chosen["max_tokens"],
                temperature=chosen["temperature"],
                seed=chosen["seed"],
                ignore_eos=chosen["ignore_eos"],
                n=chosen["n"] if chosen["temperature"] else 1,
                **options,
            ),
            priority=chosen["priority"],
            cache_salt=chosen["cache_salt"],
            is_final_only=chosen["is_final_only"],
        )


CHOICES = {**ALL_ASK, **SOME_ASK}
ASKS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}).map(Ask.of)


def random_ask(random: Random) -> Ask:
    """Return a value as hypothesis draws it."""
    return Ask.of({name: random.choice(values) for name, values in CHOICES.items()})


class StepFailed(Exception):
    """Raised in a step on purpose."""


class LostOutput(AsyncOutput):
    """The output of a step that failed on the device, which is noticed only when the output is read."""

    def __init__(self) -> None:
        """Copies nothing."""

    def get(self) -> ModelRunnerOutput:
        raise StepFailed


@dataclass(slots=True)
class Work:
    """The steps scheduled for a request."""

    request: Request
    num_stays: int = 0  # times it was admitted
    num_computed: int = 0  # positions computed or found cached in its last stay


@dataclass(slots=True)
class _Live:
    """An unfinished prompt."""

    ask: Ask
    works: list[Work]  # of its completions
    token_ids: list[list[int]] = field(init=False)  # as last told

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in self.works]


class EngineUnderTest:
    """An engine whose every step and answer is checked, and what was seen of it so far."""

    def __init__(self, llm: LLM, model: AloneModel, *, steps_ahead: int) -> None:
        self.llm, self._model, self._steps_ahead = llm, model, steps_ahead
        self.num_steps = self.num_failed_steps = self.num_preemptions = 0  # preemptions for want of blocks
        self.num_repeated = self.num_repeated_otherwise = 0
        self.finished: Counter[str] = Counter()  # by reason
        self.most_at_once = 0
        self.live: dict[str, _Live] = {}
        self._works: dict[int, Work] = {}  # by arrival: an id may be used again, that never is
        self._to_repeat: list[tuple[Ask, list[list[int]]]] = []
        self._ids = map(str, itertools.count())
        self._used_ids: set[str] = set()
        self._at_most = CUDAGraphMode.FULL
        self._failure: str | None = None
        self._execute, self._sample = llm.runner.execute_model, llm.runner.sample_tokens
        llm.runner.execute_model = self._check_and_execute  # type: ignore[method-assign, assignment]
        llm.runner.sample_tokens = self._sample_or_lose  # type: ignore[method-assign, assignment]

    def start_over(self) -> None:
        """Reset all state, so that hypothesis can repeat a failure: seeds are drawn for requests without one, too."""
        engine = self.llm.engine
        engine._random.seed(0)
        self._failure = None
        for request_id in {name.partition("/")[0] for name in engine.requests}:
            engine.abort(request_id)
        with suppress(StepFailed):
            engine.step()
        engine.scheduler.reset_prefix_cache()
        self.live.clear()
        self._works.clear()
        self._to_repeat.clear()

    def add(self, ask: Ask, request_id: str | None = None) -> str:
        """Queue it, under an id that was used before if one is given."""
        engine = self.llm.engine
        request_id = request_id or next(self._ids)
        engine.add_request(
            request_id,
            ask.prompt,
            ask.params,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            is_final_only=ask.is_final_only,
        )
        works = [Work(engine.requests[name]) for name in _names(request_id, ask)]
        self._works.update({work.request.arrival: work for work in works})
        self._used_ids.update(_names(request_id, ask))
        self.live[request_id] = _Live(ask, works)
        return request_id

    def step(self, at_most: CUDAGraphMode = CUDAGraphMode.FULL, *, failure: str | None = None) -> None:
        """Run one step, which fails if `failure` is one of `FAILURES`; the engine continues with the next."""
        self._at_most, self._failure = at_most, failure
        num_preemptions = self.llm.engine.stats.num_preemptions
        try:
            outputs = self.llm.engine.step()
        except StepFailed:
            self.num_failed_steps += 1
            return
        finally:
            self._failure = None
        self.num_preemptions += self.llm.engine.stats.num_preemptions - num_preemptions
        for output in outputs:
            self._take(output)

    def abort(self, request_id: str) -> None:
        output = self.llm.engine.abort(request_id)
        assert output is not None and output.finished
        self._take(output)

    def check_counts(self) -> None:
        stats = self.llm.engine.stats
        assert stats.num_running + stats.num_waiting == len(self.llm.engine.requests)
        assert set(self.llm.engine.requests) == {
            work.request.request_id
            for live in self.live.values()
            for work in live.works
            if work.request.finish_reason is None
        }

    def settle(self) -> None:
        """Check that all answers come, that some come again when asked for alone, and that nothing is left behind."""
        self._drain()
        repeats, self._to_repeat = self._to_repeat[:2], []
        for ask, before in repeats:
            self._repeat(ask, before)
        # Rows: these take all there are, and leave them without options.
        probe = Ask(prompt=(3,), params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        used, self._used_ids = self._used_ids, set()
        self.most_at_once = 0
        for _ in range(MAX_NUM_SEQS):
            self.add(probe)
        self._drain()
        assert self.most_at_once == MAX_NUM_SEQS
        step = self.llm.runner.step
        assert not [name for name in used if name in step.states], "rows of requests that have ended"
        assert step.sampler.is_plain(range(MAX_NUM_SEQS)), "options of requests that have ended"
        stats = self.llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks, "blocks of requests that have ended"
        assert (stats.num_running, stats.num_waiting) == (0, 0)

    def _repeat(self, ask: Ask, before: list[list[int]]) -> None:
        """Check that the tokens are the same or, from a near tie on, others that `_take` accepted as well."""
        request_id = self.add(ask)
        live = self.live[request_id]
        self._drain()
        self.num_repeated += 1
        self.num_repeated_otherwise += [work.request.output_token_ids for work in live.works] != before

    def _drain(self) -> None:
        for _ in range(1000):
            if not self.llm.engine.has_unfinished:
                break
            self.step()
        assert not self.llm.engine.has_unfinished, "requests that never end"
        assert not self.live
        self.step()  # what is in flight for requests that have ended

    def _check_and_execute(self, output: SchedulerOutput) -> None:
        """Replace the runner's `execute_model`, and check that no position is computed twice or left out in a stay."""
        requests = self.llm.engine.requests
        assert output.num_tokens <= MAX_STEP_TOKENS
        assert len({item.request_id for item in output.scheduled}) == len(output.scheduled) <= MAX_NUM_SEQS
        self.most_at_once = max(self.most_at_once, len(output.scheduled))
        for added in output.added:
            work = self._works[requests[added.request_id].arrival]
            work.num_stays += 1
            work.num_computed = added.num_computed_tokens
            assert work.num_stays <= 1 + work.request.num_preemptions, "computed anew, though never preempted"
            assert added.num_computed_tokens % BLOCK_SIZE == 0
            assert not added.num_computed_tokens or not work.request.wants_prompt_logprobs
        for item in output.scheduled:
            work = self._works[requests[item.request_id].arrival]  # KeyError: it has ended
            self._count_tokens(item, work, output)
            assert work.num_computed <= work.request.num_tokens_with_pending - item.is_sampled
        self.num_steps += 1
        if self._failure == "before":
            raise StepFailed
        self._execute(output, at_most=self._at_most)
        if self._failure == "after":
            raise StepFailed

    def _count_tokens(self, item: ScheduledRequest, work: Work, output: SchedulerOutput) -> None:
        """Check that the tokens of a step are the next ones of the stay, and count them."""
        assert item.num_computed_tokens == work.num_computed, "computed twice, or left out"
        work.num_computed += item.num_tokens

    def _most_too_many(self, reason: str) -> int:
        """How many tokens may be computed in vain for a request that ends so."""
        return self._steps_ahead if reason == "stop" else 0

    def _sample_or_lose(self, grammar_output: GrammarOutput | None) -> AsyncOutput:
        """Replace the runner's `sample_tokens`."""
        output = self._sample(grammar_output)
        return LostOutput() if self._failure == "output" else output

    def _take(self, output: RequestOutput) -> None:
        """Take an output of a prompt; the whole output is checked once the prompt has finished."""
        live = self.live[output.request_id]
        ask = live.ask
        assert output.finished or not ask.is_final_only
        assert tuple(output.prompt_token_ids) == ask.prompt and len(output.outputs) == ask.params.n
        for one, told in zip(output.outputs, live.token_ids, strict=True):
            assert one.token_ids[: len(told)] == told, "a token that was told has changed"
            told[:] = one.token_ids
        if not output.finished:
            return
        del self.live[output.request_id]
        for one, work in zip(output.outputs, live.works, strict=True):
            self._check(ask, one, work)
        self._check_prompt_logprobs(output, ask)
        is_whole = all(one.finish_reason != "abort" for one in output.outputs)
        if is_whole and ask.params.seed is not None and not ask.params.is_greedy:
            self._to_repeat.append((ask, [list(one.token_ids) for one in output.outputs]))

    def _check(self, ask: Ask, found: CompletionOutput, work: Work) -> None:
        params, tokens, reason = ask.params, found.token_ids, found.finish_reason
        assert reason is not None
        self.finished[reason] += 1
        del self._works[work.request.arrival]
        at_most = MAX_MODEL_LEN - len(ask.prompt)
        assert_ends_where_it_must(tokens, params, reason, at_most=at_most, eos_token_id=EOS)
        if params.seed is not None:
            assert work.request.seed == (params.seed + found.index) % 2**63
        if tokens:
            assert_answer(self._model, ask.prompt, tokens, params, seed=work.request.seed, eos_token_id=EOS)
        if reason != "abort":
            num_too_many = work.num_computed - (len(ask.prompt) + len(tokens) - 1)
            assert 0 <= num_too_many <= self._most_too_many(reason), num_too_many
        if params.logprobs is None:
            assert found.logprobs is None and found.cumulative_logprob is None
            return
        assert found.logprobs is not None and len(found.logprobs) == len(tokens)
        for step, (token, row) in enumerate(zip(tokens, found.logprobs, strict=True)):
            logits = self._model.logits((*ask.prompt, *tokens))[len(ask.prompt) + step - 1]
            assert_logprobs(logits, token, row, params.logprobs)
        own = [row[token].logprob for token, row in zip(tokens, found.logprobs, strict=True)]
        assert found.cumulative_logprob == pytest.approx(sum(own))

    def _check_prompt_logprobs(self, output: RequestOutput, ask: Ask) -> None:
        wanted = ask.params.prompt_logprobs
        if wanted is None:
            assert output.prompt_logprobs is None
            return
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ask.prompt)
        assert output.prompt_logprobs[0] is None
        is_computed = any(one.token_ids for one in output.outputs)
        for position, row in enumerate(output.prompt_logprobs[1:], start=1):
            if row is None:
                assert not is_computed, f"none at {position}"
                continue
            assert_logprobs(self._model.logits(ask.prompt)[position - 1], ask.prompt[position], row, wanted)


def _names(request_id: str, ask: Ask) -> list[str]:
    """The scheduler's ids."""
    return [request_id] if ask.params.n == 1 else [f"{request_id}/{index}" for index in range(ask.params.n)]


def abort_and_add(engine: EngineUnderTest, request_id: str, again: Ask | None, is_alike: bool) -> None:
    """End a request, and give its id to another, whose parameters may be the same."""
    params = engine.live[request_id].ask.params
    engine.abort(request_id)
    if again is not None:
        engine.add(replace(again, params=params) if is_alike else again, request_id)


class EngineMachine(RuleBasedStateMachine):
    """Draws events without looking at the engine: hypothesis runs a part of a life again and must draw the same.

    Which requests still live may differ from one run to the next, since drafts decide what a sampled request gets.
    """

    def __init__(self, engine: EngineUnderTest) -> None:
        super().__init__()
        self.engine = engine
        engine.start_over()

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4))
    def arrive(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.engine.add(ask)

    @rule(
        modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=8),
        failure=st.sampled_from((None,) * 6 + FAILURES),
        if_idle=ASKS,
    )
    def step(self, modes: list[CUDAGraphMode], failure: str | None, if_idle: Ask) -> None:
        """Several; the last may fail. An idle engine is given a request first."""
        if not self.engine.live:
            self.engine.add(if_idle)
        for mode in modes[:-1]:
            self.engine.step(mode)
        self.engine.step(modes[-1], failure=failure)

    @rule(number=st.integers(0, 999), again=st.none() | ASKS, is_alike=st.booleans())
    def abort(self, number: int, again: Ask | None, is_alike: bool) -> None:
        """Any request, at any time; another may come under its id while a step in flight still computes it."""
        if not self.engine.live:
            return
        request_ids = sorted(self.engine.live, key=int)
        abort_and_add(self.engine, request_ids[number % len(request_ids)], again, is_alike)

    @invariant()
    def counts_agree(self) -> None:
        self.engine.check_counts()

    def teardown(self) -> None:
        self.engine.settle()


def run_randomly(
    engine: EngineUnderTest,
    *,
    num_steps: int,
    seed: int,
    draw: Callable[[Random], Ask] = random_ask,
    num_events: int = 100,
) -> None:
    """Run the rules of `EngineMachine` without hypothesis between the steps.

    After each `num_events` all requests end, and after those in which `num_steps` were reached the run does.
    """
    random = Random(seed)
    engine.start_over()
    for number in itertools.count(1):
        event = random.random()
        if event < 0.25 or not engine.live:
            engine.add(draw(random))
        elif event < 0.29:
            request_id = random.choice(sorted(engine.live, key=int))
            again = draw(random) if random.random() < 0.5 else None
            abort_and_add(engine, request_id, again, is_alike=random.random() < 0.5)
        else:
            engine.step(random.choice(MODES), failure=random.choice(FAILURES) if event > 0.995 else None)
        engine.check_counts()
        if number % num_events == 0:
            engine.settle()
            if engine.num_steps >= num_steps:
                return


def assert_much_was_seen(engine: EngineUnderTest, min_steps: int, modes: Sequence[CUDAGraphMode]) -> None:
    """A run without preemptions, say, would have shown nothing of them."""
    stats, by_mode = engine.llm.engine.stats, engine.llm.runner.counters.by_mode()
    sys.stdout.write(
        f"{engine.num_steps} steps ({engine.num_failed_steps} failed), {engine.num_preemptions} preemptions, "
        f"{ {mode.value: count for mode, count in by_mode.items()} }, {stats}, {dict(engine.finished)}, "
        f"{engine.num_repeated} repeated, {engine.num_repeated_otherwise} of them otherwise after a near tie\n"
    )
    assert engine.num_steps >= min_steps
    assert engine.num_preemptions > 0 and stats.num_prefix_hits > 0 and engine.num_failed_steps > 0
    assert all(by_mode.get(mode, 0) > 0 for mode in modes), by_mode
    assert all(engine.finished[reason] > 0 for reason in ("stop", "length", "abort")), engine.finished
    assert engine.num_repeated > 0
    assert engine.num_repeated_otherwise <= engine.num_repeated // 50, "seeds do not repeat"


GRAPHS = {"attention_backend": "triton"}
NO_GRAPHS = {"attention_backend": "sdpa", "cudagraph_mode": "NONE"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((0, MODES, GRAPHS), id="graphs, in step"),
        pytest.param((1, MODES, GRAPHS), id="graphs, ahead"),
        pytest.param((0, MODES[2:], NO_GRAPHS), id="no graphs, in step"),
        pytest.param((1, MODES[2:], NO_GRAPHS), id="no graphs, ahead"),
    ],
)
def engine_and_modes(
    request: pytest.FixtureRequest, llama_dir: Path, llama: PreTrainedModel
) -> Iterator[tuple[EngineUnderTest, Sequence[CUDAGraphMode]]]:
    steps_ahead, modes, options = request.param
    with load(llama_dir, async_scheduling=bool(steps_ahead), **TINY, **options) as llm:
        yield EngineUnderTest(llm, AloneModel(llama), steps_ahead=steps_ahead), modes


@pytest.mark.parametrize(
    ("max_examples", "min_steps"), [(6, 500), pytest.param(40, 1_500, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_every_order_of_events_gives_the_right_outputs(
    engine_and_modes: tuple[EngineUnderTest, Sequence[CUDAGraphMode]], max_examples: int, min_steps: int
) -> None:
    """Run that many steps in each of four engines; hypothesis draws the events and shrinks failures."""
    engine, modes = engine_and_modes
    run_state_machine_as_test(
        functools.partial(EngineMachine, engine),  # type: ignore[arg-type]  # anything that makes a machine
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert_much_was_seen(engine, min_steps, modes)


PLAIN = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("num_prompt", [3, 38])
def test_a_reused_id_inherits_nothing_from_the_previous_request(
    engine_and_modes: tuple[EngineUnderTest, Sequence[CUDAGraphMode]], num_prompt: int
) -> None:
    """A step in flight brings log probabilities of a prompt whose request is gone."""
    engine, _ = engine_and_modes
    engine.start_over()
    params = replace(PLAIN, prompt_logprobs=0)
    request_id = engine.add(Ask(prompt=tuple(range(10, 40)), params=params))
    engine.step()
    engine.abort(request_id)
    engine.add(Ask(prompt=tuple(range(50, 50 + num_prompt)), params=params), request_id)
    engine.abort(engine.add(Ask(prompt=(3, 4), params=params)))
    engine.settle()


def test_reused_ids_get_new_rows(
    engine_and_modes: tuple[EngineUnderTest, Sequence[CUDAGraphMode]],
) -> None:
    """A batch of the ids of the one before, none of whose requests is the same."""
    engine, _ = engine_and_modes
    engine.start_over()
    params = replace(PLAIN, max_tokens=8)
    ids = [engine.add(Ask(prompt=(7, 8 + i), params=params)) for i in range(3)]
    for _ in range(4):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
    for i, request_id in enumerate(ids):
        engine.add(Ask(prompt=(70, 80 + i), params=params), request_id)
    engine.settle()


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, temperature=0.7),
        replace(PLAIN, temperature=1.3, top_k=3),
        replace(PLAIN, temperature=1.3, top_p=0.6),
        replace(PLAIN, temperature=1.3, top_p=0.9, top_k=20, min_p=0.05),
        replace(PLAIN, temperature=1.0, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=-0.5),
        replace(PLAIN, temperature=1.0, ignore_eos=False, min_tokens=2, logit_bias={50: 4.0, EOS: 50.0}),
    ],
    ids=lambda params: f"{params.temperature}, {params.top_k}, {params.top_p}, {params.repetition_penalty}",
)
def test_the_reference_usually_accepts_one_token_only(llama: PreTrainedModel, params: SamplingParams) -> None:
    """The reference refuses all other tokens; two are right only if a value is close to an option's threshold."""
    prompt, output = (7, 8, 9, 10, 40), (50,)
    raw = AloneModel(llama).logits((*prompt, *output))[-1]
    right = torch.stack([right_tokens(raw, prompt, output, params, seed=seed, eos_token_id=EOS) for seed in range(100)])
    assert right.any(1).all() and int((right.sum(1) > 1).sum()) <= 5
    assert bool(right[:, EOS].any()) is False or params.min_tokens == 0
    num_different = int(right.any(0).sum())
    if params.is_greedy:
        assert right[0].nonzero().tolist() == [[int(raw.argmax())]]
    else:
        assert num_different > 1
    if params.top_k == 3:
        assert right.any(0).nonzero().flatten().tolist() == sorted(raw.topk(3).indices.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["in step", "ahead"])
def test_many_events_on_a_gpu_give_the_right_outputs(llama_dir: Path, llama: PreTrainedModel, steps_ahead: int) -> None:
    """20,000 steps over CUDA graphs in the two together."""
    with load(llama_dir, device="cuda", async_scheduling=bool(steps_ahead), **TINY, **GRAPHS) as llm:
        engine = EngineUnderTest(llm, AloneModel(llama), steps_ahead=steps_ahead)
        run_randomly(engine, num_steps=10_000, seed=steps_ahead)
        assert_much_was_seen(engine, 10_000, MODES)
