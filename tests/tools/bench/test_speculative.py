"""No figure for runs whose answers differ, except behind tokens that nearly tie."""

from __future__ import annotations

import pytest

from piecegraph.errors import VerificationError
from piecegraph.runner.common.logprobs import Logprob
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats
from piecegraph.tools.bench.speculative import SpeculativeRow, count_ties


def answer(*tokens: int, runner_up: int = 9, margin: float = 2.0) -> RequestOutput:
    """Each token has one other token behind it by `margin`."""
    rows = [{token: Logprob(-0.5, 1), runner_up: Logprob(-0.5 - margin, 2)} for token in tokens]
    output = CompletionOutput(index=0, text="", token_ids=list(tokens), logprobs=rows)
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=[1], finished=True, outputs=[output])


def test_equal_answers_have_no_ties() -> None:
    assert count_ties([answer(1, 2, 3)], [answer(1, 2, 3)], 0.01) == 0


def test_behind_a_tie_answers_may_differ() -> None:
    assert count_ties([answer(1, 9, 5), answer(4)], [answer(1, 2, 3, margin=0.005), answer(4)], 0.01) == 1


@pytest.mark.parametrize("found", [answer(1, 9, 3), answer(1, 8, 3)], ids=["not a tie", "an unlikely token"])
def test_other_differences_are_failures(found: RequestOutput) -> None:
    with pytest.raises(VerificationError, match="at token 1: [89] instead of 2"):
        count_ties([found], [answer(1, 2, 3)], 0.01)


def test_the_figure_is_the_median_runs() -> None:
    stats = SpeculationStats(
        num_verifications=4, num_draft_tokens=8, num_accepted_tokens=6, num_accepted_by_position=(4, 2)
    )
    row = SpeculativeRow(
        method="ngram", num_drafts=2, output_tokens=60, seconds=(3.0, 1.0, 2.0), num_ties=0, speculation=stats
    )
    record = row.as_record()
    assert record["tokens_per_s"] == 30.0 and record["acceptance_rate"] == 0.75
    assert record["mean_acceptance_length"] == 2.5 and record["accepted_by_position"] == [4, 2]
