"""A bias is added once, however long the lists of others are."""

from __future__ import annotations

import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.options.protocol import SamplingBatch
from tests.runner.sampling.sampling_case import Case, make_sampler


def test_a_bias_is_added_once() -> None:
    """Lists of other lengths are staged before and after."""
    biases: list[dict[int, float]] = [{1: 2.5}, {0: 1.0, 2: -1.0, 4: 7.0}, {}, {5: -1e300}]
    cases = [Case(params=SamplingParams(logit_bias=bias)) for bias in biases]
    sampler = None
    for case, row in zip(cases, range(4), strict=True):
        sampler, _ = make_sampler([case], [row], vocab_size=6, sampler=sampler)
    assert sampler is not None
    _, inputs = make_sampler(cases, [0, 1, 2, 3], vocab_size=6, sampler=sampler)
    processed = sampler.process(torch.ones(4, 6), SamplingBatch(temperature=sampler.temperature, **inputs))
    expected = torch.ones(4, 6)
    for i, bias in enumerate(biases):
        for token, value in bias.items():
            expected[i, token] += max(value, torch.finfo(torch.float32).min)
    assert torch.equal(processed, expected)
