"""What a request is checked against needs no engine, and every refusal names what was found and what was wanted."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph import SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.engine.request_checks import RequestChecks, make_grammars

EOS = frozenset({1, 2})


def checks(**changed: Any) -> RequestChecks:
    """Return the checks of an engine without a tokenizer: 10 tokens, texts of up to 8."""
    fields: dict[str, Any] = {
        "tokenizer": None,
        "eos_token_ids": EOS,
        "max_model_len": 8,
        "vocab_size": 10,
        "embedding_size": None,
        "max_logprobs": 3,
        "logits_processors": (),
        "grammars": make_grammars(None, 10, EOS),
    }
    return RequestChecks(**{**fields, **changed})


@pytest.mark.parametrize(
    ("tokens", "params", "said"),
    [
        ([], {}, "the prompt is empty"),
        ([0] * 8, {}, r"the prompt has 8 tokens; max_model_len=8 leaves room for at most 7"),
        ([0, 10], {}, r"token id 10; ids go from 0 to 9"),
        ([0], {"stop": "a"}, r"stop strings need a tokenizer.*use stop_token_ids"),
        ([0], {"bad_words": ["a"]}, r"bad_words need a tokenizer.*use logit_bias"),
        ([0], {"logprobs": 4}, r"logprobs=4; it must be at most max_logprobs=3"),
        ([0], {"prompt_logprobs": -1}, r"prompt_logprobs=-1; it must be at most max_logprobs=3"),
        ([0], {"structured_outputs": {"choice": ["a"]}}, r"structured_outputs need a tokenizer"),
    ],
)
def test_a_request_that_can_never_run_is_refused(tokens: list[int], params: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        checks().check(tokens, SamplingParams(**params))


def test_a_prompt_is_measured_after_it_is_cut() -> None:
    params = SamplingParams(truncate_prompt_tokens=-1)
    checks().check(list(range(10)), params)
    assert checks().prompt_tokens(list(range(10)), params) == [3, 4, 5, 6, 7, 8, 9]


def test_eos_ends_a_text_unless_it_is_ignored() -> None:
    assert checks().stop_token_ids(SamplingParams(stop_token_ids=[5])) == {1, 2, 5}
    assert checks().stop_token_ids(SamplingParams(stop_token_ids=[5], ignore_eos=True)) == {5}
