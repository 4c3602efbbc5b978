"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

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

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """The form of Hermes and Qwen."""

    name = "hermes"
    markers = (BEGIN, END)

    def is_format_of(self, template: str) -> bool:
        return BEGIN in template

    def parser(self) -> MessageParser:
        return HermesParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int], many: bool) -> str:
        schemas = " | ".join(json_rule(call_schema(tool, "arguments")) for tool in tools)
        begin, end = as_literal(BEGIN, special), as_literal(END, special)
        more = ' ("\\n" call)*' if many else ""
        return f'start: call{more}\ncall: {begin} "\\n" body "\\n" {end}\nbody: {schemas}\n'


class HermesParser(MessageParser):
    """The parser: text outside of the tags is content, each pair of tags is a call.

    What stands between tags and is no call, or has no end, is content as it was written.
    """

    def __init__(self) -> None:
        self._text = ""  # not settled yet
        self._is_inside = False
        self._is_between = False  # behind a call, and nothing but space since

    def feed(self, text: str) -> MessageDelta:
        self._text += text
        found = MessageDelta()
        while True:
            if self._is_inside:
                inside, tag, rest = self._text.partition(END)
                if not tag:
                    return found
                call = _call(inside)
                found += MessageDelta(tool_calls=[call]) if call else MessageDelta(content=f"{BEGIN}{inside}{END}")
                self._text, self._is_inside, self._is_between = rest, False, call is not None
            else:
                before, tag, rest = self._text.partition(BEGIN)
                length = len(before) - (0 if tag else held_back(before, (BEGIN,)))
                if not (self._is_between and not before[:length].strip()):  # space between calls is not content
                    found.content += before[:length]
                    self._is_between = False
                    self._text = before[length:]
                if not tag:
                    return found
                self._text, self._is_inside = rest, True

    def finish(self) -> MessageDelta:
        text, self._text = self._text, ""
        if not self._is_inside:
            return MessageDelta(content="" if self._is_between and not text.strip() else text)
        self._is_inside = False
        call = _call(text)  # a model may end without the last tag
        return MessageDelta(tool_calls=[call]) if call else MessageDelta(content=BEGIN + text)


def _call(text: str) -> Any:
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None
