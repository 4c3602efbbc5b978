"""Random requests with options that the machine over the engine lacks (stop strings, bad words, grammars, allowed
tokens, biases) answer with drafts as without, in engines with many blocks and with few."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from piecegraph import LLM, RequestOutput, SamplingParams
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import NGRAM, assert_same_logprobs
from tests.runner.test_graphs import load

ROOMY = {"num_kv_blocks": 400, "max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 72}
TIGHT = {**ROOMY, "num_kv_blocks": 20, "max_num_seqs": 5, "max_num_batched_tokens": 16}
LETTERS = [str(byte_tokenizer().decode([token])) for token in (40, 41, 42)]
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": f"[{''.join(LETTERS)}]{{2,12}}"},
    {"json": {"type": "array", "items": {"type": "integer"}}, "disable_any_whitespace": True},
    {"choice": ["abab", "abc", "xyzxyz"]},
)


def options(random: Random) -> dict[str, Any]:
    """The options of a request, some of which leave it few tokens, so that drafts are often right."""
    some: dict[str, Any] = {
        "repetition_penalty": random.choice([0.5, 1.3, 2.0]),
        "frequency_penalty": random.choice([-1.0, 1.5]),
        "presence_penalty": random.choice([-1.0, 1.5]),
        "top_k": random.choice([1, 2, 5]),
        "top_p": random.choice([0.3, 0.8]),
        "min_tokens": random.randrange(4),
        "stop_token_ids": [random.choice([40, 41, 42])],
        "stop": ["".join(random.choices(LETTERS, k=random.randrange(1, 4)))],
        "bad_words": ["".join(random.choices(LETTERS, k=2))],
        "ignore_eos": True,
        "logprobs": random.choice([0, 1, 5]),
        "extra_args": {"num_speculative_tokens": random.randrange(4)},
    }
    chosen = {name: value for name, value in some.items() if random.random() < 0.3}
    kind = random.random()
    if kind < 0.2:
        chosen["structured_outputs"] = random.choice(GRAMMARS)
        chosen.pop("min_tokens", None)
        chosen.pop("bad_words", None)
    elif kind < 0.7:
        chosen["allowed_token_ids"] = random.choice([[40, 41, 42, 1], [40], [40, 41]])
    else:
        chosen["logit_bias"] = {40: random.choice([2.0, 9.0]), 41: 5.0}
    sampled = {"temperature": random.choice([0.3, 1.0, 1.7]), "n": random.choice([1, 1, 3])}
    temperature = sampled if random.random() < 0.6 else {"temperature": 0.0}
    return {**chosen, **temperature, "seed": random.randrange(10**6), "max_tokens": random.choice([4, 5, 9, 17, 25])}


def answers(llm: LLM, seed: int, count: int) -> list[RequestOutput]:
    random = Random(seed)
    prompts, params = [], []
    for _ in range(count):
        repeated = random.choice([[40, 41, 42], [40, 41], [7, 8, 9, 10], [40]]) * 20
        tail = [random.randrange(3, 250) for _ in range(random.randrange(4))]
        prompts.append({"prompt_token_ids": [*repeated[: random.randrange(1, 44)], *tail]})
        params.append(SamplingParams(**options(random)))
    return llm.generate(prompts, params, priority=[place % 3 for place in range(count)], use_tqdm=False)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 25), *(pytest.param(seed, 120, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_answers_are_those_without_drafts(llama_dir: Path, seed: int, count: int) -> None:
    """By prompt lookup and by the model itself, with steps ahead and preemptions."""
    with load(llama_dir, skip_tokenizer_init=False, **ROOMY) as llm:
        expected = answers(llm, seed, count)
    for speculative, is_ahead in ((NGRAM, False), (drafts_by(llama_dir), True)):
        drafting = {"speculative_config": speculative, "async_scheduling": is_ahead}
        with load(llama_dir, skip_tokenizer_init=False, **TIGHT, **drafting) as llm:
            found, stats = answers(llm, seed, count), llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
        assert stats.speculation is not None and stats.speculation.num_wasted_tokens > 0
        assert stats.speculation.num_accepted_tokens > 0 or speculative is not NGRAM, "a model knows no option"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                assert (list(one.token_ids), one.text) == (list(other.token_ids), other.text), number
                assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason), number
                assert_same_logprobs(one.logprobs, other.logprobs)
