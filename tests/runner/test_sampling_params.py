"""A value out of range is refused with its field, the value and the range."""

from __future__ import annotations

import re

import pytest

from piecegraph import SamplingParams
from piecegraph.errors import RequestError

BAD = [
    ({"n": 0}, "n=0; it must be 1 or more"),
    ({"n": 2, "temperature": 0.0}, "n=2; it must be 1 when temperature is 0"),
    ({"min_p": 1.5}, "min_p=1.5; it must be from 0 (off) to 1"),
    ({"min_p": -0.1}, "min_p=-0.1; it must be from 0 (off) to 1"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1; it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3; it must be from -2 to 2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0; it must be above 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf; it must be above 0"),
    ({"min_tokens": -1}, "min_tokens=-1; it must be 0 or more"),
    ({"min_tokens": 17}, "min_tokens=17; it must be at most max_tokens=16"),
    ({"logprobs": -2}, "logprobs=-2; it must be 0 or more, -1 (all tokens) or None"),
    ({"prompt_logprobs": True}, "prompt_logprobs=True; it must be 0 or more"),
    ({"allowed_token_ids": []}, "allowed_token_ids=(); it must hold a token id or more, or be None"),
    ({"allowed_token_ids": [3, -1]}, "allowed_token_ids=-1; it must be token ids, 0 or more"),
    ({"bad_words": "no"}, "bad_words='no'; it must be a list of strings: ['no']"),
    ({"bad_words": ["no", ""]}, "bad_words=''; it must be strings, none of them empty"),
    ({"logit_bias": [1, 2]}, "logit_bias=[1, 2]; it must be token ids with a number each"),
    ({"logit_bias": {-1: 2.0}}, "logit_bias=-1; it must be token ids, 0 or more"),
    ({"logit_bias": {"7": 2.0}}, "logit_bias='7'; it must be token ids"),
    ({"logit_bias": {7: float("nan")}}, "logit_bias[7]=nan; it must be a finite number"),
    ({"temperature": -0.1}, "temperature=-0.1; it must be a number, 0 (greedy) or more"),
    ({"temperature": float("nan")}, "temperature=nan; it must be"),
    ({"temperature": "hot"}, "temperature='hot'; it must be"),
    ({"top_p": 0.0}, "top_p=0.0; it must be above 0, at most 1"),
    ({"top_p": 1.5}, "top_p=1.5; it must be above 0, at most 1"),
    ({"top_k": -2}, "top_k=-2; it must be 1 or more, or 0 or -1 (off)"),
    ({"top_k": 1.5}, "top_k=1.5; it must be"),
    ({"seed": -1}, "seed=-1; it must be from 0 to 2**63 - 1, or None"),
    ({"max_tokens": -4}, "max_tokens=-4; it must be 1 or more, or None"),
    ({"max_tokens": 0}, "max_tokens=0; it must be 1 or more"),
    ({"max_tokens": True}, "max_tokens=True; it must be"),
    ({"stop": ["a", ""]}, "stop=''; it must be a string, or several, none of them empty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1; it must be token ids, 0 or more"),
    ({"ignore_eos": 1}, "ignore_eos=1; it must be True or False"),
    ({"stop": "x", "detokenize": False}, "stop strings are found in the text, and detokenize=False makes none"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_unknown_names_are_told_apart() -> None:
    """vLLM's that we lack by name; a typo with its neighbour."""
    with pytest.raises(RequestError, match="sampling parameter 'best_of' is not yet available"):
        SamplingParams.from_options(best_of=2)
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'\. Did you mean 'temperature'"):
        SamplingParams.from_options(temprature=0.1)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-7).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_tokens_of_another_vocabulary_are_refused() -> None:
    """Logits have no such entry; a token that stops the text is merely never drawn."""
    SamplingParams(allowed_token_ids=[9], logit_bias={9: 1.0}, stop_token_ids=[99]).check_vocabulary(10)
    with pytest.raises(RequestError, match="allowed_token_ids=10; it must be token ids below 10, the model's"):
        SamplingParams(allowed_token_ids=[3, 10]).check_vocabulary(10)
    with pytest.raises(RequestError, match="logit_bias=12; it must be token ids below 10"):
        SamplingParams(logit_bias={12: 1.0}).check_vocabulary(10)


def test_what_is_given_cannot_change_later() -> None:
    """Equal parameters hash alike, whatever lists and dicts they were made from."""
    bias, allowed, words = {1: 2.0}, [1, 2], ["no"]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed, bad_words=words)
    bias[1], allowed[0], words[0] = 0.0, 9, "yes"
    assert dict(params.logit_bias or {}) == {1: 2.0}
    assert params.allowed_token_ids == (1, 2)
    assert params.bad_words == ("no",)
    again = SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=(1, 2), bad_words=("no",))
    assert params == again and hash(params) == hash(again)


def test_several_completions_need_a_temperature() -> None:
    assert SamplingParams(n=3).n == 3
