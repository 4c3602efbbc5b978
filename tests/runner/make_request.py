"""Requests without an engine around them."""

from __future__ import annotations

from piecegraph.runner.request import Request
from piecegraph.runner.sampling_params import SamplingParams


def make_request(request_id: str, num_prompt: int, max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=list(range(1, num_prompt + 1)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_total_tokens=num_prompt + max_tokens,
        detokenizer=None,
    )
