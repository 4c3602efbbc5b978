"""The parts of a chat answer, and the interface of the parsers that find them in the model's text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    def reply(self) -> dict[str, Any]:
        """Return the call as the API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True, kw_only=True)
class MessageDelta:
    """What a piece of the model's text adds to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: MessageDelta) -> MessageDelta:
        return MessageDelta(
            content=self.content + other.content,
            reasoning=self.reasoning + other.reasoning,
            tool_calls=[*self.tool_calls, *other.tool_calls],
        )


class MessageParser(ABC):
    """A parser of one answer, which is fed its text in pieces of any size and gives each part once."""

    @abstractmethod
    def feed(self, text: str) -> MessageDelta:
        """Take the next piece of text; returns what is settled by now."""

    @abstractmethod
    def finish(self) -> MessageDelta:
        """Return what was held back, at the end of the text."""


class PlainText(MessageParser):
    """The parser of answers that are text alone."""

    def feed(self, text: str) -> MessageDelta:
        return MessageDelta(content=text)

    def finish(self) -> MessageDelta:
        return MessageDelta()


class ToolFormat(ABC):
    """The form in which a family of models writes calls of tools: one file each, chosen by the chat template."""

    name: str

    @abstractmethod
    def is_format_of(self, template: str) -> bool:
        """Return whether a chat template asks for calls in this form."""

    @abstractmethod
    def parser(self) -> MessageParser:
        """Return a parser of one answer."""

    @abstractmethod
    def grammar(self, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int], many: bool) -> str:
        """Return a grammar in Lark's notation of one call of one of `tools`, or with `many` of one or more.

        `tools` are functions with `name` and `parameters`, a JSON schema. `special`: the token ids of those of
        `markers` that the tokenizer has as one special token.
        """

    markers: tuple[str, ...] = ()
    """The texts around calls, which models may have as special tokens: such a token has to be kept in the text."""


def call_schema(tool: Mapping[str, Any], arguments: str, at: str = "#") -> dict[str, Any]:
    """Return the schema of `{"name": ..., arguments: {...}}` for one tool.

    `at` is where it will stand in a larger schema: references of the tool's own schema are led there.
    """
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, arguments: _moved(parameters, f"{at}/properties/{arguments}")},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, Mapping):
        is_reference = isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#")
        moved = {name: _moved(value, to) for name, value in schema.items()}
        return {**moved, "$ref": to + schema["$ref"][1:]} if is_reference else moved
    return [_moved(value, to) for value in schema] if isinstance(schema, list) else schema


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the expansion of a Lark rule for JSON of `schema`, spaced as models were taught: as `json.dumps` does."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def call_of(value: Any) -> ToolCall | None:
    """Return the call that a decoded JSON object is; None if it is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=value["name"], arguments=text)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def as_literal(marker: str, special: Mapping[str, int]) -> str:
    """Return a marker as Lark has it: a special token by its id, any other text in quotes."""
    return f"<[{special[marker]}]>" if marker in special else json.dumps(marker)
