"""An exception at any point of an engine that drafts loses nothing, no token of the several of a step included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecegraph import SamplingParams
from piecegraph.runner.engine.engine import Engine
from tests.rounds import ROUNDS
from tests.runner.engine.test_engine_faults import ERRORS, Ask, Fault, Run, assert_equal, inject, run
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import FEW, NGRAM
from tests.runner.test_graphs import load

SIZES = {"max_model_len": 48, "block_size": 4, "num_kv_blocks": 12, "max_num_seqs": 5, "max_num_batched_tokens": 16}


def sampled(seed: int, **options: Any) -> SamplingParams:
    few = {"temperature": 1.2, "max_tokens": 9, "ignore_eos": True, "allowed_token_ids": FEW}
    return SamplingParams(seed=seed, **{**few, **options})


ASKS = {
    "logged": Ask(prompt=[40, 41, 42, 40, 41], params=sampled(1, logprobs=2)),
    "prompt-logged": Ask(prompt=[40, 41, 42] * 7, params=sampled(2, prompt_logprobs=1, max_tokens=6)),
    "stopped": Ask(
        prompt=[40, 41, 40, 41, 40], params=sampled(3, stop=["HI", "GG"], logprobs=0, max_tokens=20), arrives_at=2
    ),
    "two": Ask(prompt=[40, 40, 41, 41, 42, 42], params=sampled(4, n=2, max_tokens=8), is_final_only=True),
    "quiet": Ask(prompt=[41, 42], params=sampled(5, max_tokens=20), is_final_only=True),
    "ends": Ask(prompt=[40, 41, 40], params=sampled(6, ignore_eos=False, stop_token_ids=[42], max_tokens=20)),
    "aborted": Ask(prompt=[41] * 9, params=sampled(7, max_tokens=30), arrives_at=3, aborted_at=8),
}


@pytest.fixture(scope="module")
def without_drafts(llama_dir: Path) -> Run:
    with load(llama_dir, skip_tokenizer_init=False, **SIZES) as llm:
        return run(llm.engine, Fault(None), ASKS)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[Engine]:
    options = {"async_scheduling": request.param, "skip_tokenizer_init": False, "speculative_config": NGRAM}
    with load(llama_dir, **SIZES, **options) as llm:
        yield llm.engine


@pytest.fixture(scope="module")
def undisturbed(engine: Engine, without_drafts: Run) -> tuple[Run, int]:
    """Return the outputs of a run without a fault, and the number of lines that it executes."""
    fault = Fault(None)
    found = run(engine, fault, ASKS)
    assert_equal(found, without_drafts, KeyboardInterrupt(), [])
    reasons = {name: [one.finish_reason for one in output.outputs] for name, output in found.finished.items()}
    assert reasons["stopped"] == ["stop"] and reasons["ends"] == ["stop"] and reasons["aborted"] == ["abort"], reasons
    stats = engine.stats.speculation
    assert stats is not None and stats.num_accepted_tokens > 5
    return found, fault.num_lines


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_fault_anywhere_loses_nothing(engine: Engine, undisturbed: tuple[Run, int], error: BaseException) -> None:
    inject(engine, undisturbed, error, 8, seed=1, asks=ASKS)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_many_faults_lose_nothing(engine: Engine, undisturbed: tuple[Run, int], error: BaseException) -> None:
    inject(engine, undisturbed, error, 30 * ROUNDS, seed=2, asks=ASKS)


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [False, True], ids=["in step", "ahead"])
def test_a_fault_while_a_model_drafts_loses_nothing(llama_dir: Path, without_drafts: Run, is_ahead: bool) -> None:
    """Before, inside and after its passes."""
    options = {"async_scheduling": is_ahead, "skip_tokenizer_init": False, "speculative_config": drafts_by(llama_dir)}
    with load(llama_dir, **SIZES, **options) as llm:
        fault = Fault(None)
        found = run(llm.engine, fault, ASKS)
        assert_equal(found, without_drafts, KeyboardInterrupt(), [])
        for error in ERRORS:
            inject(llm.engine, (found, fault.num_lines), error, 6 * ROUNDS, seed=3, asks=ASKS)
