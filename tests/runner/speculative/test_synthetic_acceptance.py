"""With synthetic acceptance a verification gives the tokens that were asked for, by itself and in an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph import SamplingParams, StructuredOutputsParams
from piecegraph.errors import RequestError
from piecegraph.runner.speculative.common.synthetic_acceptance import (
    conditional_rates,
    rates_of_length,
    synthetic_tokens,
)
from piecegraph.runner.speculative.common.verified_rows import VerifiedRows
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import SIZES
from tests.runner.speculative.test_drafter import speculation
from tests.runner.test_graphs import load


def test_rates_are_vllms() -> None:
    """Those of a length have the least variance; conditional ones are ratios, and 0 behind what is never accepted."""
    assert rates_of_length(2.5, 3) == (1.0, 0.5, 0.0) and rates_of_length(4, 3) == (1.0, 1.0, 1.0)
    assert conditional_rates((0.8, 0.4, 0.0)) == [0.8, 0.5, 0.0] and conditional_rates((0.0, 0.0)) == [0.0, 0.0]


def test_rows_take_the_draft_or_another_token() -> None:
    """Two requests with three rows each, of which the second has one draft only, and a row of padding."""
    rows = VerifiedRows(
        first_rows=torch.tensor([0, 3, 6]),
        logits_indices=torch.tensor([0, 1, 2, 3, 4, 5, 0]),
        idx_mapping=torch.tensor([1, 1, 1, 0, 0, 0, -1], dtype=torch.int32),
        positions=torch.tensor([9, 10, 11, 4, 5, 6, 0], dtype=torch.int32),
        num_drafts=torch.tensor([2, 1]),
    )
    input_ids = torch.tensor([50, 51, 52, 60, 61, 62])
    drawn = torch.tensor([51, 7, 8, 7, 7, 7, 0])

    def tokens(*rates: float) -> list[int]:
        seeds = torch.tensor([3, 4])
        return synthetic_tokens(
            drawn, rows, input_ids=input_ids, seeds=seeds, rates=torch.tensor(rates), vocab_size=100
        ).tolist()

    assert tokens(1.0, 1.0) == [51, 52, 8, 61, 7, 7, 0]
    assert tokens(0.0, 0.0) == [52, 7, 8, 7, 7, 7, 0]
    assert tokens(1.0, 0.0) == [51, 7, 8, 61, 7, 7, 0]


@pytest.mark.parametrize(
    "is_ahead",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["each step awaited", "a step ahead"],
)
def test_an_engine_accepts_as_many_as_it_is_told(llama_dir: Path, is_ahead: bool) -> None:
    """Over graphs and for requests with options; it says so, and refuses grammars."""
    config = drafts_by(llama_dir, rejection_sample_method="synthetic", synthetic_acceptance_rates=(0.75, 0.5, 0.5))
    with load(llama_dir, speculative_config=config, async_scheduling=is_ahead, **SIZES) as llm:
        params = [
            SamplingParams(
                temperature=0.9 * (i % 2),
                top_k=20 if i % 3 == 2 else -1,
                seed=i,
                max_tokens=44,
                ignore_eos=True,
            )
            for i in range(12)
        ]
        llm.generate([{"prompt_token_ids": [5 + i] * (1 + i % 4)} for i in range(12)], params, use_tqdm=False)
        found = speculation(llm)
        assert found.is_synthetic and "by given rates" in str(found)
        whole = found.num_verifications
        shares = [count / whole for count in found.num_accepted_by_position]
        assert whole > 100
        assert shares == pytest.approx([0.75, 0.5, 0.5], abs=0.15), "and the ends of texts have fewer drafts"
        with pytest.raises(RequestError, match="accepted whatever they are"):
            llm.generate(
                {"prompt_token_ids": [5]}, SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
            )
