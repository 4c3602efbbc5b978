"""Adapters are named by vLLM's fields, and each prompt has one or none."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph import LoRARequest
from piecegraph.errors import RequestError
from piecegraph.runner.lora.request import per_prompt_loras

ONE = LoRARequest("sql", 1, "/adapters/sql")


def test_one_for_all_prompts_or_one_each() -> None:
    assert per_prompt_loras(None, 2) == [None, None]
    assert per_prompt_loras(ONE, 2) == [ONE, ONE]
    assert per_prompt_loras([None, ONE], 2) == [None, ONE]
    assert LoRARequest(lora_name="sql", lora_int_id=1, lora_path="/adapters/sql") == ONE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sql", "lora_request='sql'; it must be a LoRARequest or None, one or one per prompt"),
        ([ONE, "sql"], "lora_request='sql'"),
        ([ONE], "2 prompts, but 1 lora_requests"),
    ],
)
def test_anything_else_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        per_prompt_loras(given, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "a"), "lora_name=''; it must be a string that is not empty"),
        (("sql", 1, None), "lora_path=None"),
        (("sql", 0, "a"), "lora_int_id=0; it must be a whole number from 1"),
        (("sql", True, "a"), "lora_int_id=True"),
    ],
)
def test_fields_are_checked(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LoRARequest(*fields)
