"""A value out of range is refused with its field, the value and the range."""

from __future__ import annotations

import re

import pytest

from piecegraph import SamplingParams
from piecegraph.errors import RequestError

BAD = [
    ({"n": 2}, "n=2; it must be 1 (several completions"),
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
    with pytest.raises(RequestError, match="sampling parameter 'min_p' is not yet available"):
        SamplingParams.from_options(min_p=0.1)
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
