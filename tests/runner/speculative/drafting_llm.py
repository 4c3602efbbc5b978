"""Requests of every kind whose texts repeat themselves, so that drafts are accepted, and an `LLM` that drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piecegraph import LLM, RequestOutput, SamplingParams
from tests.runner.logprob_values import values_of
from tests.runner.test_graphs import load

NUM_DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "stops_when_slower": False,
}
FEW = [40, 41, 42]
"""The only tokens of some answers: a third of what is drafted is right."""

PROMPTS = {
    "greedy": ([5, 6, 7, 8] * 3, SamplingParams(temperature=0.0, max_tokens=14, allowed_token_ids=FEW)),
    "plain": ([9, 10, 11], SamplingParams(temperature=0.2, seed=2, max_tokens=12, ignore_eos=True)),
    "logged": ([40, 41] * 4, SamplingParams(seed=3, max_tokens=12, allowed_token_ids=FEW, logprobs=2)),
    "prompt-logged": (
        [40, 41, 42] * 6,
        SamplingParams(seed=4, max_tokens=6, allowed_token_ids=FEW, prompt_logprobs=1, logprobs=0),
    ),
    "stopped": (
        [40, 41, 40, 42],
        SamplingParams(seed=5, max_tokens=20, allowed_token_ids=FEW, stop_token_ids=[42], min_tokens=6),
    ),
    "penalised": (
        [40, 42] * 5,
        SamplingParams(temperature=0.7, seed=6, max_tokens=12, frequency_penalty=-1.5, top_k=20, min_p=0.02),
    ),
    "two": ([41, 42, 41], SamplingParams(seed=7, n=2, max_tokens=11, allowed_token_ids=FEW, top_p=0.9)),
    "off": (
        [40, 41, 42, 40],
        SamplingParams(seed=8, max_tokens=9, allowed_token_ids=FEW, extra_args={"num_speculative_tokens": 0}),
    ),
    "fewer": (
        [42, 40, 42, 40],
        SamplingParams(seed=9, max_tokens=16, allowed_token_ids=FEW, extra_args={"num_speculative_tokens": 1}),
    ),
}

SIZES: dict[str, Any] = {"max_num_seqs": 6, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 32}
SIZES["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32]


def drafting(folder: Path, **options: Any) -> LLM:
    """An `LLM` over recorded graphs that drafts by prompt lookup."""
    return load(folder, speculative_config=NGRAM, **{**SIZES, **options})


def answers(llm: LLM) -> list[RequestOutput]:
    """The answers to `PROMPTS`, some of which are more urgent than others."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in PROMPTS.values()]
    params = [one for _, one in PROMPTS.values()]
    priorities = [place % 3 for place in range(len(params))]
    return llm.generate(prompts, params, priority=priorities, use_tqdm=False)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens, ends and log probabilities."""
    for name, ours, theirs in zip(PROMPTS, found, expected, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids), name
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason), name
            assert_same_logprobs(one.logprobs, other.logprobs)
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    """The same tokens at each position, with values up to the noise of float32."""
    assert (found is None) == (expected is None)
    for row, other in zip(found or (), expected or (), strict=True):
        assert (row is None) == (other is None)
        ours, theirs = values_of(row or {}), values_of(other or {})
        assert ours.keys() == theirs.keys()
        assert all(value == theirs[token] or abs(value - theirs[token]) < 1e-4 for token, value in ours.items())
