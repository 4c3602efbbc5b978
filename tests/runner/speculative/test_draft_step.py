"""What a pass of a draft model reads and writes, where a request has no slot and in a row of padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piecegraph import LLM
from piecegraph.runner.speculative.draft_step import DraftStep
from piecegraph.runner.speculative.drafter import Drafter
from tests.runner.speculative.draft_models import NUM_DRAFTS, drafts_by
from tests.runner.speculative.drafting_llm import SIZES
from tests.runner.test_graphs import load

PROMPT = [40, 41, 42, 43, 44, 45]


@pytest.fixture(scope="module")
def llm(llama_dir: Path) -> Iterator[LLM]:
    with load(llama_dir, speculative_config=drafts_by(llama_dir), **SIZES) as llm:
        yield llm


@pytest.fixture
def step(llm: LLM) -> Iterator[DraftStep]:
    """A request in row 0 with six tokens, the last of which is not computed, and two blocks of four."""
    drafter = getattr(llm.runner, "drafter", None)
    assert isinstance(drafter, Drafter)
    states = drafter.step.target.states
    row = states.add("one", PROMPT, [[3, 5]], num_computed_tokens=5)
    assert row == 0
    states.apply_writes()
    for cache in drafter.step.kv_caches.values():
        for tensor in cache.tensors:
            tensor.fill_(-7.0)
    yield drafter.step
    states.remove("one")


def propose(step: DraftStep, *, num_slots: int, num_drafts: int) -> list[int]:
    """Draft for the request and a row of padding; return the row's tokens."""
    speculation = step.target.speculation
    speculation.num_slots[0], speculation.num_proposed[0] = num_slots, num_drafts
    step.propose(torch.tensor([0, -1], dtype=torch.int32))
    return step.target.states.token_ids[0].tolist()


def written(step: DraftStep) -> list[int]:
    """The slots whose keys were written."""
    (first, *_) = step.kv_caches.values()
    return (first.key.flatten(0, 1).flatten(1) != -7.0).any(1).nonzero().flatten().tolist()


@torch.no_grad()
def test_a_pass_writes_the_newest_two_tokens_and_each_draft_but_the_last(step: DraftStep) -> None:
    tokens = propose(step, num_slots=8, num_drafts=NUM_DRAFTS)
    assert tokens[:6] == PROMPT
    assert written(step) == [5 * 4 + 0, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3]


@torch.no_grad()
def test_no_draft_is_read_that_has_no_slot(step: DraftStep) -> None:
    """Nor written, where the row of tokens would have room."""
    before = step.target.states.token_ids[0].tolist()
    tokens = propose(step, num_slots=7, num_drafts=2)
    assert written(step) == [5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert tokens[8:] == before[8:]


@torch.no_grad()
def test_the_token_before_the_newest_is_read_although_that_has_no_slot(step: DraftStep) -> None:
    """It may be a draft that was accepted last, which no pass has read."""
    before = step.target.states.token_ids[0].tolist()
    assert propose(step, num_slots=5, num_drafts=0) == before
    assert written(step) == [5 * 4]
