"""Calls as Mistral models write them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from piecegraph.tools.serve.message_parsers.protocol import (
    MessageDelta,
    MessageParser,
    ToolFormat,
    as_literal,
    call_of,
    call_schema,
    held_back,
    json_rule,
)

MARKER = "[TOOL_CALLS]"


class Mistral(ToolFormat):
    """The form of Mistral."""

    name = "mistral"
    markers = (MARKER,)

    def is_format_of(self, template: str) -> bool:
        return MARKER in template

    def parser(self) -> MessageParser:
        return MistralParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int], many: bool) -> str:
        schemas = [call_schema(tool, "arguments", f"#/items/anyOf/{place}") for place, tool in enumerate(tools)]
        calls = {"type": "array", "items": {"anyOf": schemas}, "minItems": 1, **({} if many else {"maxItems": 1})}
        return f"start: {as_literal(MARKER, special)} body\nbody: {json_rule(calls)}\n"


class MistralParser(MessageParser):
    """The parser: text before the marker is content, the list behind it is held back to its end."""

    def __init__(self) -> None:
        self._text = ""
        self._is_list = False

    def feed(self, text: str) -> MessageDelta:
        self._text += text
        if self._is_list:
            return MessageDelta()
        before, marker, rest = self._text.partition(MARKER)
        if marker:
            self._text, self._is_list = rest, True
            return MessageDelta(content=before)
        length = len(before) - held_back(before, (MARKER,))
        self._text = before[length:]
        return MessageDelta(content=before[:length])

    def finish(self) -> MessageDelta:
        text, self._text = self._text, ""
        if not self._is_list:
            return MessageDelta(content=text)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        calls = [call_of(value) for value in values] if isinstance(values, list) else []
        if calls and all(calls):
            return MessageDelta(tool_calls=[call for call in calls if call is not None])
        return MessageDelta(content=MARKER + text)
