"""Fields that hold a text, several texts, token ids, or several lists of token ids: `prompt` and `input`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler

from piecegraph.errors import shorten


def text_or_tokens(name: str, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Return what `handler` makes of the field `name`. Raises `ValueError` that says what does not fit."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such lists; "
            f"{_first_misfit(name, value)}."
        ) from None


def _first_misfit(name: str, value: Any) -> str:
    """Return what does not fit into any form that `input` may have."""
    if not isinstance(value, list):
        return f"it is {shorten(repr(value))}"
    kind = type(value[0])
    for number, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, str | int | list):
            return f"{name}[{number}] is {shorten(repr(item))}"
        if type(item) is not kind:
            return f"{name}[{number}] is {shorten(repr(item))}, and {name}[0] is {shorten(repr(value[0]))}"
        if isinstance(item, list):
            for place, token in enumerate(item):
                if type(token) is not int:
                    return f"{name}[{number}][{place}] is {shorten(repr(token))}"
    return "one of its numbers is out of range"
