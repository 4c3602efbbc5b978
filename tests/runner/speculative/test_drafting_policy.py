"""Drafting stops where it is measured to be slower, says why, and is tried again; no answer depends on that."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from piecegraph.runner.speculative.common.drafting_policy import FIRST_PROBE, NUM_PROBES, NUM_TRIALS, DraftingPolicy
from piecegraph.runner.speculative.speculative_scheduler import SpeculativeScheduler
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import NGRAM, SIZES, answers, assert_same
from tests.runner.test_graphs import load


def life(policy: DraftingPolicy, num_steps: int, *, plain: float, drafted: float, tokens: int) -> list[bool]:
    """Which of so many steps of one request draft, where the kinds of steps take so long and give so many tokens."""
    found = []
    for _ in range(num_steps):
        drafts = policy.drafts(1)
        found.append(drafts)
        seconds, given, count = (drafted, tokens, 3) if drafts else (plain, 1, 0)
        policy.record(1, seconds=seconds, num_tokens=given, num_drafts=count)
    return found


def test_drafting_that_pays_goes_on_and_is_seldom_measured() -> None:
    policy = DraftingPolicy()
    found = life(policy, 5_000, plain=1.0, drafted=2.0, tokens=3)
    assert found[: FIRST_PROBE + NUM_PROBES + 1] == [True] * FIRST_PROBE + [False] * NUM_PROBES + [True]
    assert found.count(False) <= 7 * NUM_PROBES and not policy.reason and policy.num_stopped_steps == 0


def test_drafting_that_does_not_pay_stops_with_the_reason() -> None:
    """It is tried again after ever longer pauses."""
    policy = DraftingPolicy()
    found = life(policy, 1_000, plain=0.010, drafted=0.012, tokens=1)
    assert found.count(True) <= FIRST_PROBE + 4 * NUM_TRIALS
    assert policy.reason == (
        "a verification gives 1.00 tokens a request and takes 12.00 ms, a step without drafts 10.00 ms"
    )
    assert policy.num_stopped_steps > 800


def test_drafting_begins_again_when_it_pays() -> None:
    """Texts change; and what was learned about one number of requests says nothing of many more."""
    policy = DraftingPolicy()
    life(policy, 100, plain=1.0, drafted=1.5, tokens=1)
    assert policy.reason and not policy.drafts(1)
    assert policy.drafts(8) and not policy.reason
    found = life(policy, 400, plain=1.0, drafted=1.5, tokens=4)
    assert all(found[-50:]) and not policy.reason


def test_steps_that_find_no_drafts_are_measures_of_plain_ones() -> None:
    """As by prompt lookup; there need not be others."""
    policy = DraftingPolicy()
    for step in range(2 * (FIRST_PROBE + NUM_PROBES)):
        policy.drafts(1)
        policy.record(1, seconds=3.0 if step % 2 else 1.0, num_tokens=1, num_drafts=step % 2)
    assert policy.reason


class Fickle(DraftingPolicy):
    """Stops and begins again at any step."""

    def __init__(self) -> None:
        super().__init__()
        self._random, self._reason = Random(3), ""

    @property
    def reason(self) -> str:
        return self._reason

    def drafts(self, num_reqs: int) -> bool:
        found = self._random.random()
        self._reason = "so" if found < 0.4 else ""  # else a step without drafts is one to be measured
        self.num_stopped_steps += found < 0.4
        return found > 0.5


@pytest.mark.parametrize("is_ahead", [False, True], ids=["each step awaited", "a step ahead"])
@pytest.mark.parametrize("method", ["ngram", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_it(llama_dir: Path, method: str, is_ahead: bool) -> None:
    """Whenever drafting stops and begins again; a draft model then writes nothing for requests it has not read."""
    config = {**(NGRAM if method == "ngram" else drafts_by(llama_dir)), "stops_when_slower": True}
    with load(llama_dir, **SIZES) as llm:
        expected = answers(llm)
    with load(llama_dir, **SIZES, speculative_config=config, async_scheduling=is_ahead) as llm:
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, SpeculativeScheduler)
        scheduler._policy_of_drafts = Fickle()
        for _ in range(3):
            assert_same(answers(llm), expected)
        stats = llm.engine.stats.speculation
        assert stats is not None and stats.num_accepted_tokens > 0 and stats.num_stopped_steps > 5
        gauge = next(one for one in llm.get_metrics() if one.name == "piecegraph:spec_decode_is_stopped")
        assert gauge.labels["reason"] == stats.stop_reason and gauge.value == bool(stats.stop_reason)  # type: ignore[attr-defined]
