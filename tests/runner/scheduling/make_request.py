"""Requests for tests that look at counts and order only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.scheduling.request import Request

_arrivals = itertools.count()


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    num_output: int = 10,
    *,
    priority: int = 0,
    prompt_logprobs: bool = False,
    cache_salt: str = "",
) -> Request:
    """`prompt`: its tokens, or their number; then no two such requests share a token. Arrives after all before."""
    arrival = next(_arrivals)
    tokens = list(range(arrival * 1000, arrival * 1000 + prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(prompt_logprobs=1 if prompt_logprobs else None),
        seed=0,
        max_total_tokens=len(tokens) + num_output,
        arrival=arrival,
        priority=priority,
        cache_salt=cache_salt,
    )
