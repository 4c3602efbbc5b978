"""Conversion of the token ids that callers give to lists of plain integers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from piecegraph.errors import RequestError


def as_token_ids(field: str, values: Any) -> list[int]:
    """Return `values` as a new list of ints.

    `values` is a sequence of integers (numpy's and one-element integer tensors included), a numpy array or a torch
    tensor of one dimension and an integer type. Booleans are refused: `True` is not a token. The range is not checked.

    Raises `RequestError`, which names `field` and what was found.
    """
    if type(values) is list and set(map(type, values)) <= {int}:
        return list(values)
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise RequestError(f"{field}={values!r}; it must be a list of token ids.")
    return [as_token_id(field, value) for value in _array_values(field, values)]


def as_token_id(field: str, value: Any) -> int:
    """Return a token id, given as an int, a numpy integer or an integer tensor of one element, as an int.

    Raises `RequestError` for anything else, booleans included.
    """
    if type(value) is int:
        return value
    kind = str(getattr(value, "dtype", "")) or type(value).__name__
    if "bool" in kind or "float" in kind or "complex" in kind or isinstance(value, str | bytes):
        raise RequestError(f"{field} has token id {value!r}; ids are whole numbers, 0 or more.")
    try:
        return int(value.__index__())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise RequestError(f"{field} has token id {value!r}; ids are whole numbers, 0 or more.") from None


def kept_tokens(token_ids: list[int], truncate_prompt_tokens: int | None, max_model_len: int) -> list[int]:
    """Return what `truncate_prompt_tokens` leaves of a prompt: its end, or all of it for None.

    -1 leaves as many tokens as `max_model_len` has room for besides one of the output.
    """
    if truncate_prompt_tokens is None:
        return token_ids
    return token_ids[-(max_model_len - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens) :]


def plain_number(value: Any) -> Any:
    """Return a numpy integer or float as a Python number, and anything else, booleans included, unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.integer | numpy.floating):
        return value
    return int(value) if isinstance(value, numpy.integer) else float(value)


def _array_values(field: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return the elements of an array or a tensor as Python values; return anything else unchanged."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    is_array = numpy is not None and isinstance(values, numpy.ndarray)
    is_tensor = torch is not None and isinstance(values, torch.Tensor)
    if not (is_array or is_tensor):
        return values
    array: Any = values
    if array.ndim != 1:
        raise RequestError(f"{field} has shape {tuple(array.shape)}; token ids are an array of one dimension.")
    found: list[Any] = array.tolist()
    return found
