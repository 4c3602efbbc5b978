"""Calls as Llama 3 models write them: the whole answer is `{"name": ..., "parameters": {...}}`, or several with `;`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from piecegraph.tools.serve.message_parsers.protocol import (
    MessageDelta,
    MessageParser,
    ToolCall,
    ToolFormat,
    call_of,
    call_schema,
    json_rule,
)

PYTHON_TAG = "<|python_tag|>"


class Llama(ToolFormat):
    """The form of Llama 3."""

    name = "llama3_json"
    markers = (PYTHON_TAG,)

    def is_format_of(self, template: str) -> bool:
        return PYTHON_TAG in template or ('"parameters"' in template and "<|eom_id|>" in template)

    def parser(self) -> MessageParser:
        return LlamaParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, special: Mapping[str, int], many: bool) -> str:
        schemas = " | ".join(json_rule(call_schema(tool, "parameters")) for tool in tools)
        more = ' ("; " call)*' if many else ""
        return f"start: call{more}\ncall: {schemas}\n"


class LlamaParser(MessageParser):
    """The parser: an answer that begins with a brace or the tag is held back to its end, any other is content."""

    def __init__(self) -> None:
        self._text = ""
        self._is_content = False

    def feed(self, text: str) -> MessageDelta:
        if self._is_content:
            return MessageDelta(content=text)
        self._text += text
        begun = self._text.lstrip()
        if not begun or begun.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(begun):
            return MessageDelta()
        self._is_content = True
        whole, self._text = self._text, ""
        return MessageDelta(content=whole)

    def finish(self) -> MessageDelta:
        whole, self._text = self._text, ""
        calls = _calls(whole.strip().removeprefix(PYTHON_TAG))
        return MessageDelta(tool_calls=calls) if calls else MessageDelta(content=whole)


def _calls(text: str) -> list[ToolCall]:
    """Return the calls that `text` consists of; none if it has anything else."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = call_of(value)
        if call is None:
            return []
        calls.append(call)
        rest = text[at:].lstrip(" \n;")
        at = len(text) - len(rest)
    return calls
