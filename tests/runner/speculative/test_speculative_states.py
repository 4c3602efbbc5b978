"""An engine that drafts, over random lives of requests: each token is held against transformers alone, as without.

The machine is that of tests/runner/engine/test_engine_states.py: arrivals, chunks, cached prefixes, aborts, ids that
are used again, preemptions, failing steps, forced modes, and every option of a request.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from transformers import PreTrainedModel

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from tests.rounds import ROUNDS
from tests.runner.engine.test_engine_states import (
    MODES,
    TINY,
    Ask,
    EngineMachine,
    EngineUnderTest,
    Work,
    assert_much_was_seen,
    run_randomly,
)
from tests.runner.engine_model import AloneModel
from tests.runner.speculative.draft_models import drafts_by, save_first_layers
from tests.runner.speculative.drafting_llm import NGRAM, NUM_DRAFTS
from tests.runner.speculative.heads.random_heads import drafts_by_head, save_small_head
from tests.runner.speculative.heads.test_mtp import MTP, save_with_mtp
from tests.runner.test_graphs import load


class DraftingEngineUnderTest(EngineUnderTest):
    """An engine that drafts; some requests ask for fewer drafts, and some for none."""

    def add(self, ask: Ask, request_id: str | None = None) -> str:
        count = len(ask.prompt) % 7
        is_free = ask.params.logit_bias is None and ask.params.seed is None
        if is_free and len(ask.prompt) > 1:  # a text that repeats itself; `settle` adds shorter prompts
            ask = replace(ask, params=replace(ask.params, logit_bias={50: 30.0}))
        if count <= NUM_DRAFTS:
            ask = replace(ask, params=replace(ask.params, extra_args={"num_speculative_tokens": count}))
        return super().add(ask, request_id)

    def _count_tokens(self, item: ScheduledRequest, work: Work, output: SchedulerOutput) -> None:
        """A step begins where those before it end if they accept all drafts, or some, or none."""
        num_rejected_at_most = work.num_computed - item.num_computed_tokens
        num_drafts = output.num_drafts.get(item.request_id, 0)
        assert 0 <= num_rejected_at_most <= NUM_DRAFTS, "computed twice, or left out"
        assert num_drafts <= NUM_DRAFTS and num_drafts < item.num_tokens
        assert num_drafts <= (work.request.sampling_params.extra_args or {}).get("num_speculative_tokens", NUM_DRAFTS)
        work.num_computed = item.num_computed_tokens + item.num_tokens

    def _most_too_many(self, reason: str) -> int:
        return (1 + NUM_DRAFTS) * (1 + self._steps_ahead)


NUM_STEPS = 2_000
"""Steps in the whole life of one engine, those of the tests before included; there are ten engines."""

HALF = "half"
HEAD = "head"
OWN_LAYER = "mtp"
LIKELY = [50, 40]
"""The tokens of a head: 50 is what a text that repeats itself consists of."""
GRAPHS = {"attention_backend": "triton"}
NO_GRAPHS = {"attention_backend": "sdpa", "cudagraph_mode": "NONE"}
slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((0, MODES, GRAPHS, NGRAM), id="ngram, graphs, in step"),
        pytest.param((1, MODES, GRAPHS, NGRAM), id="ngram, graphs, ahead", marks=slow),
        pytest.param((0, MODES[2:], NO_GRAPHS, NGRAM), id="ngram, no graphs, in step", marks=slow),
        pytest.param((0, MODES, GRAPHS, None), id="itself, graphs, in step", marks=slow),
        pytest.param((1, MODES, GRAPHS, None), id="itself, graphs, ahead"),
        pytest.param((1, MODES, GRAPHS, HALF), id="half, graphs, ahead", marks=slow),
        pytest.param((0, MODES[2:], NO_GRAPHS, HALF), id="half, no graphs, in step", marks=slow),
        pytest.param((1, MODES, GRAPHS, HEAD), id="head, graphs, ahead", marks=slow),
        pytest.param((0, MODES[2:], NO_GRAPHS, HEAD), id="head, no graphs, in step", marks=slow),
        pytest.param((1, MODES, GRAPHS, OWN_LAYER), id="mtp, graphs, ahead", marks=slow),
    ],
)
def engine_and_modes(
    request: pytest.FixtureRequest, llama_dir: Path, llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineUnderTest, Sequence[CUDAGraphMode]]]:
    steps_ahead, modes, options, drafts = request.param
    config: dict[str, Any] = drafts_by(llama_dir, draft_sample_method="probabilistic") if drafts is None else drafts
    if drafts == HALF:
        config = drafts_by(save_first_layers(llama, 1, tmp_path_factory.mktemp("half"), llama_dir))
    if drafts == HEAD:
        config = drafts_by_head(save_small_head(llama, tmp_path_factory.mktemp("head"), LIKELY))
    folder, alone = llama_dir, llama
    if drafts == OWN_LAYER:
        config, folder = MTP, tmp_path_factory.mktemp("mtp")
        alone = save_with_mtp("GLM-4.5", folder)
    with load(folder, async_scheduling=bool(steps_ahead), speculative_config=config, **TINY, **options) as llm:
        yield DraftingEngineUnderTest(llm, AloneModel(alone), steps_ahead=steps_ahead), modes


@pytest.mark.parametrize(
    ("max_examples", "min_steps"), [(4, 150), pytest.param(8 * ROUNDS, 250 * ROUNDS, marks=slow)], ids=["quick", "long"]
)
def test_every_order_of_events_gives_the_right_outputs(
    engine_and_modes: tuple[EngineUnderTest, Sequence[CUDAGraphMode]], max_examples: int, min_steps: int
) -> None:
    engine, _ = engine_and_modes
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
    assert engine.num_steps >= min_steps
    answer_repeated_texts(engine)
    assert_drafts_were_seen(engine)


@slow
def test_a_long_life(engine_and_modes: tuple[EngineUnderTest, Sequence[CUDAGraphMode]]) -> None:
    """Of 20,000 steps over the ten engines, of every method."""
    engine, modes = engine_and_modes
    run_randomly(engine, num_steps=NUM_STEPS, seed=5)
    assert_much_was_seen(engine, NUM_STEPS, modes)
    assert_drafts_were_seen(engine)


def answer_repeated_texts(engine: EngineUnderTest) -> None:
    """Answer greedy prompts that repeat themselves: what requests without a seed draw may leave few drafts."""
    engine.start_over()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={50: 30.0})
    for first in range(3, 19):
        engine.add(Ask(prompt=(first, 50, 50, 50, 50), params=params))
    engine.settle()


def assert_drafts_were_seen(engine: EngineUnderTest) -> None:
    """Accepted ones and rejected ones; of a random MTP layer only one of some 400 is accepted."""
    stats = engine.llm.engine.stats.speculation
    assert stats is not None and stats.num_draft_tokens > 100
    step: Any = engine.llm.runner.step
    assert stats.num_accepted_tokens > 0 or (step.config.method == "mtp" and stats.num_draft_tokens < 2_000)
    if engine.llm.notes and any("half" in note for note in engine.llm.notes):
        assert stats.num_accepted_tokens < stats.num_draft_tokens
