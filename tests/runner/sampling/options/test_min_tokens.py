"""Tokens that end a text are masked up to the last token before it may end."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from tests.runner.sampling.sampling_case import Case, make_sampler


@pytest.mark.parametrize(("num_output", "may_end"), [(0, False), (2, False), (3, True), (4, True)])
def test_stop_tokens_are_masked_up_to_min_tokens(num_output: int, may_end: bool) -> None:
    """Tokens of another request's longer list, or outside the vocabulary, change nothing."""
    case = Case(
        params=SamplingParams(temperature=0.0, min_tokens=3),
        prompt=(1, 1, 1, 1, 1),
        output=(2,) * num_output,
        stop_token_ids=(4, 99, 7),
    )
    other = Case(params=SamplingParams(temperature=0.0, min_tokens=9), stop_token_ids=(0, 1, 2, 3, 4, 5, 6))
    logits = torch.tensor([[0, 1, 2, 3, 9, 4, 5, 8]] * 2, dtype=torch.float32)
    sampler, inputs = make_sampler([case, other], [2, 0], vocab_size=8)
    assert sampler.sample(logits, **inputs).token_ids.tolist() == [4 if may_end else 6, 7]


def test_nothing_to_forbid_costs_nothing() -> None:
    cases = [Case(params=SamplingParams(min_tokens=3)), Case(params=SamplingParams(), stop_token_ids=(1,))]
    sampler, inputs = make_sampler(cases, [0, 1], vocab_size=8)
    assert sampler.is_plain(inputs["rows"])
