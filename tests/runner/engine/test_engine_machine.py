"""The engine under any order of arrivals, steps and aborts answers each request as transformers would alone.

A tiny block pool forces preemptions, a small budget forces chunks, prompts share prefixes, and each step runs
under a mode that is drawn. Tokens are checked one by one against transformers' logits after the very tokens
before them: the likeliest, or for a seeded request the likeliest with its noise added, up to the noise of float32.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from transformers import PreTrainedModel

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.llm import LLM
from piecegraph.runner.sampling.gumbel_sample import gumbel_noise
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from tests.runner.logprob_values import values_of
from tests.runner.test_graphs import load

MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)
TIE = 2e-3
"""Scores closer than this may be ordered either way: float32 products over other numbers of rows differ."""

PREFIXES = ([7, 8, 9, 10] * 6, [7, 8, 9, 10] * 2 + [40, 41, 42, 43] * 4, list(range(100, 124)))
PROMPTS = st.builds(
    lambda prefix, length, tail: [*PREFIXES[prefix][:length], *tail],
    st.integers(0, 2),
    st.integers(0, 24),
    st.lists(st.integers(3, 260), min_size=1, max_size=6),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "seed": st.integers(0, 2**63 - 1),
        "logprobs": st.sampled_from([None, None, None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None] * 7 + [1]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [], list(range(3, 90))]),
        "n": st.sampled_from([1, 1, 1, 2]),
    }
)


class Subject:
    """An engine, what transformers says, and what was seen over all runs."""

    def __init__(self, llm: LLM, model: PreTrainedModel) -> None:
        self.llm, self.model = llm, model
        self.steps = 0
        self.finished: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()  # tokens scheduled, by the scheduler's request
        self.cached: dict[str, int] = {}
        self.at_most = CUDAGraphMode.FULL
        self._execute = llm.runner.execute_model
        llm.runner.execute_model = self._execute_and_count  # type: ignore[method-assign]

    def reset(self) -> None:
        """Reset all state, so that hypothesis can repeat a failure."""
        engine = self.llm.engine
        for name in tuple(engine.requests):
            engine.abort(name.partition("/")[0])
        engine.step()
        engine.scheduler.reset_prefix_cache()
        self.computed.clear()
        self.cached.clear()
        self.at_most = CUDAGraphMode.FULL

    def _execute_and_count(self, output: SchedulerOutput, **_: Any) -> None:
        self.steps += 1
        for added in output.added:
            self.cached.setdefault(added.request_id, added.num_computed_tokens)
        for item in output.scheduled:
            self.computed[item.request_id] += item.num_tokens
        self._execute(output, at_most=self.at_most)

    @torch.no_grad()
    def check(self, output: RequestOutput, params: SamplingParams) -> None:
        """Every token, why it ended, and its log probabilities."""
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            logits = self.model(torch.tensor([tokens])).logits[0].double()
            self._check_tokens(output.prompt_token_ids, completion, params, logits)
            if params.logprobs is not None:
                assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
                expected = logits.log_softmax(-1)
                for i, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                    at = expected[len(output.prompt_token_ids) + i - 1]
                    assert len(found) in (params.logprobs, params.logprobs + 1)
                    assert (
                        all(abs(float(at[one]) - value) < TIE for one, value in values_of(found).items())
                        and token in found
                    )
            self.finished[str(completion.finish_reason)] += 1
        if params.prompt_logprobs is not None and any(one.token_ids for one in output.outputs):
            assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
            expected = logits.log_softmax(-1)
            for position, row in enumerate(output.prompt_logprobs[1:], start=1):
                assert row is not None and output.prompt_token_ids[position] in row
                assert all(
                    abs(float(expected[position - 1, one]) - value) < TIE for one, value in values_of(row).items()
                )

    def _check_tokens(
        self, prompt: list[int], completion: CompletionOutput, params: SamplingParams, logits: torch.Tensor
    ) -> None:
        for i, token in enumerate(completion.token_ids):
            position = len(prompt) + i
            scores = logits[position - 1]
            if not params.is_greedy:
                assert params.seed is not None
                seed = torch.tensor([(params.seed + completion.index) % 2**63])
                noise = gumbel_noise(seed, torch.tensor([position]), len(scores))[0]
                scores = scores / params.temperature + noise.double()
            assert float(scores.max() - scores[token]) < TIE, (i, token, int(scores.argmax()))
            ends = token in (params.stop_token_ids or ()) or (token == 1 and not params.ignore_eos)
            is_last = i == len(completion.token_ids) - 1
            assert not ends or is_last, "went on after a token that ends it"
            if is_last and completion.finish_reason == "stop":
                assert ends
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == params.max_tokens

    def check_work(self, request_id: str, num_prompt: int, num_tokens: int, num_preemptions: int) -> None:
        """Check that no token was computed twice without a preemption, except one of a request that had just ended."""
        computed = self.computed.pop(request_id, 0)
        cached = self.cached.pop(request_id, 0)
        if num_preemptions == 0 and num_tokens:
            needed = num_prompt - cached + num_tokens - 1
            assert needed <= computed <= needed + 1, (request_id, computed, needed)


def machine_of(subject: Subject) -> type[RuleBasedStateMachine]:
    class EngineMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.ids = map(str, itertools.count())
            self.running: dict[str, SamplingParams] = {}
            self.requests: dict[str, Any] = {}
            subject.reset()

        @rule(prompt=PROMPTS, options=PARAMS, priority=st.integers(0, 2))
        def arrive(self, prompt: list[int], options: dict[str, Any], priority: int) -> None:
            if options["temperature"] == 0.0:
                options = {**options, "n": 1}
            request_id, params = next(self.ids), SamplingParams(**options)
            subject.llm.engine.add_request(request_id, prompt, params, priority=priority)
            self.running[request_id] = params
            self.requests.update(subject.llm.engine.requests)

        @precondition(lambda self: self.running)
        @rule(mode=st.sampled_from(MODES), count=st.integers(1, 6))
        def step(self, mode: CUDAGraphMode, count: int) -> None:
            subject.at_most = mode
            for _ in range(count):
                self._take(subject.llm.engine.step())

        @precondition(lambda self: self.running)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            request_id = data.draw(st.sampled_from(sorted(self.running, key=int)))
            output = subject.llm.engine.abort(request_id)
            assert output is not None and output.finished
            self._take([output])

        def _take(self, outputs: list[RequestOutput]) -> None:
            for output in outputs:
                if not output.finished:
                    continue
                params = self.running.pop(output.request_id)
                subject.check(output, params)
                for one in output.outputs:
                    name = output.request_id if params.n == 1 else f"{output.request_id}/{one.index}"
                    preemptions = self.requests.pop(name).num_preemptions
                    if one.finish_reason != "abort":
                        subject.check_work(name, len(output.prompt_token_ids), len(one.token_ids), preemptions)

        def teardown(self) -> None:
            engine = subject.llm.engine
            while engine.has_unfinished:
                self._take(engine.step())
            engine.step()  # what is still in flight for requests that have ended
            assert not self.running and not self.requests
            stats = engine.stats
            assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"
            assert (stats.num_running, stats.num_waiting) == (0, 0)

    return EngineMachine


OPTIONS: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 18, "max_num_batched_tokens": 16, "max_num_seqs": 5}


def subject_on(device: str, is_ahead: bool, folder: Path, model: PreTrainedModel) -> Subject:
    return Subject(load(folder, device=device, async_scheduling=is_ahead, **OPTIONS), model)


@pytest.fixture(scope="module", params=[False, True], ids=["each step awaited", "a step ahead"])
def subject(request: pytest.FixtureRequest, llama_dir: Path, llama: PreTrainedModel) -> Iterator[Subject]:
    made = subject_on("cpu", request.param, llama_dir, llama)
    yield made
    made.llm.close()


def run(subject: Subject, *, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine_of(subject),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def assert_all_was_seen(subject: Subject, min_steps: int) -> None:
    """A run that met no preemption, or no mode, would show nothing."""
    stats, modes = subject.llm.engine.stats, subject.llm.runner.counters.by_mode()
    assert subject.steps >= min_steps, subject.steps
    assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
    assert all(modes.get(mode, 0) > 0 for mode in MODES), modes
    assert all(subject.finished[reason] > 0 for reason in ("stop", "length", "abort")), subject.finished


@pytest.mark.slow
def test_every_order_of_events_gives_the_right_outputs(subject: Subject) -> None:
    for examples in (60, 90):  # what hypothesis draws depends on which modules are loaded
        run(subject, max_examples=examples, steps=40)
        if subject.steps >= 1_400:
            break
    assert_all_was_seen(subject, 1_400)  # in each of the two variants


@pytest.mark.gpu
def test_every_order_of_events_gives_the_right_outputs_on_a_gpu(
    llama_dir: Path, llama: PreTrainedModel, record_property: Callable[[str, object], None]
) -> None:
    """20,000 steps over CUDA graphs, half of them a step ahead."""
    for is_ahead in (False, True):
        subject = subject_on("cuda", is_ahead, llama_dir, llama)
        for examples in itertools.count(150):
            run(subject, max_examples=examples, steps=50)
            if subject.steps >= 10_000:
                break
        assert_all_was_seen(subject, 10_000)
        record_property(f"steps, ahead={is_ahead}", subject.steps)
        sys.stdout.write(f"ahead={is_ahead}: {subject.steps} steps, {subject.llm.engine.stats}, {subject.finished}\n")
        subject.llm.close()
