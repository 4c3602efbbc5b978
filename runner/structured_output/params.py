"""`StructuredOutputsParams`, the form that a request's output must have; names and meanings are vLLM's."""

from __future__ import annotations

import copy
import hashlib
import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from piecegraph.errors import RequestError, did_you_mean, shorten

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of which a request gives exactly one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output: exactly one of the first six fields.

    Raises `RequestError` unless there is exactly one, of the right type. Whether it can be compiled is known only when
    a request takes it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as a dictionary or as text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar, in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text in which each of some tags, once begun, is followed by JSON of a schema:
    `{"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}`."""
    disable_any_whitespace: bool = False
    """True: JSON has no whitespace but that of a schema's own strings. False: up to 20 characters between two parts, so
    that a model that likes line breaks comes to an end."""
    disable_additional_properties: bool = False
    """True: objects of a schema have only the properties that it names, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression for whitespace in JSON, instead of the above."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "nothing is given"
            raise RequestError(f"structured_outputs: {found}; give exactly one of {', '.join(CONSTRAINTS)}.")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(name, getattr(self, name), str, "a string")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check(name, getattr(self, name), bool, "true or false")
        _check("json_object", self.json_object, bool, "true")
        _check("json", self.json, (str, Mapping, bool), "a JSON schema, as a dictionary or as text")
        _check("structural_tag", self.structural_tag, (str, Mapping), "a dictionary, or JSON text of one")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            if not (is_list and self.choice and all(isinstance(text, str) and text for text in self.choice)):
                raise _wrong("choice", self.choice, "strings, one or more, none of them empty")
        for name in ("json", "structural_tag"):  # what the caller changes later changes nothing here
            try:
                object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
            except RecursionError as error:
                raise RequestError(f"structured_outputs: {name} is nested too deeply; flatten it.") from error

    @property
    def json_schema(self) -> Any:
        """The schema of `json` or `json_object` as data. Raises `RequestError` if its text is not JSON."""
        if self.json_object:
            return {"type": "object"}
        return parsed("json", self.json)

    def digest(self) -> str:
        """Return a hash of everything that the output's form depends on."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            text = json_text.dumps(values, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: the schema is not JSON ({error}).") from error
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def as_structured_outputs(value: Any) -> StructuredOutputsParams:
    """Return the parameters that `value` stands for: themselves, or a mapping of their fields."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("structured_outputs", value, "StructuredOutputsParams, or a mapping of its fields")
    names = [field.name for field in fields(StructuredOutputsParams)]
    for name in value:
        if name not in names:
            raise RequestError(f"structured_outputs has {name!r}, which it does not take.{did_you_mean(name, names)}")
    return StructuredOutputsParams(**value)


def parsed(name: str, value: Any) -> Any:
    """Return JSON text as data, and data as it is. Raises `RequestError` for text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json_text.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs: {name} is not JSON ({error}).") from error


def _check(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value, wanted)


def _wrong(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{name}={shorten(repr(value))}; it must be {wanted}.")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
