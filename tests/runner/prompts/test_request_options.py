"""Arguments of a call that generates are taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.prompts.request_options import (
    check_request_fields,
    per_request_priority,
    refuse_lora,
    refuse_unknown_options,
)


@pytest.mark.parametrize(("priority", "found"), [(None, [0, 0]), (3, [3, 3]), ([1, -2], [1, -2])])
def test_priorities_are_one_a_request(priority: Any, found: list[int]) -> None:
    assert list(per_request_priority(priority, 2)) == found


@pytest.mark.parametrize(
    ("priority", "message"),
    [([1], "2 prompts, but 1 priorities"), (True, "priority=True; it must be a whole"), ([1, "a"], "priority='a'")],
)
def test_invalid_priorities_are_refused(priority: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        per_request_priority(priority, 2)


def test_adapters_are_refused() -> None:
    refuse_lora(None)
    refuse_lora([None, None])
    with pytest.raises(RequestError, match="lora_request='a'; a model that pools takes no LoRA adapter"):
        refuse_lora("a")


def test_arguments_of_older_vllm_are_refused_by_name() -> None:
    refuse_unknown_options("generate", {"prompt_token_ids": None}, mm_processor_kwargs={})
    with pytest.raises(RequestError, match="generate takes no prompt_token_ids: give the ids as prompts"):
        refuse_unknown_options("generate", {"prompt_token_ids": [1]})
    with pytest.raises(RequestError, match="mm_processor_kwargs={'a': 1} is not available here"):
        refuse_unknown_options("generate", {}, mm_processor_kwargs={"a": 1})
    with pytest.raises(TypeError, match=r"argument 'sampling_parms'\. Did you mean 'sampling_params'"):
        refuse_unknown_options("generate", {"sampling_parms": 1})


FIELDS: dict[str, Any] = {
    "request_id": "a",
    "prompt": None,
    "sampling_params": SamplingParams(),
    "priority": 0,
    "cache_salt": "",
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("request_id", 5, "request_id=5; it must be a string"),
        ("request_id", ["a"], "request_id=\\['a'\\]; it must be a string"),
        ("prompt", b"x", "prompt=b'x'; it must be the text of the token ids"),
        ("sampling_params", None, "sampling_params=None; they must be SamplingParams"),
        ("priority", float("nan"), "priority=nan; it must be a whole number of 64 bits"),
        ("priority", True, "priority=True"),
        ("priority", 2**63, "priority=9223372036854775808"),
        ("cache_salt", None, "cache_salt=None; it must be a string"),
        ("cache_salt", "\ud800", "cannot be encoded as UTF-8 .*; give text without lone surrogates"),
    ],
)
def test_fields_that_a_step_could_not_use_are_refused(field: str, value: object, message: str) -> None:
    check_request_fields(**FIELDS)
    with pytest.raises(RequestError, match=message):
        check_request_fields(**{**FIELDS, field: value})
