"""Reasoning between `<think>` and `</think>`, as DeepSeek-R1 and Qwen3 models write it before their answers."""

from __future__ import annotations

from piecegraph.tools.serve.message_parsers.protocol import MessageDelta, MessageParser, held_back

BEGIN, END = "<think>", "</think>"


def is_thinking(template: str) -> bool:
    """Return whether a chat template knows reasoning in these tags."""
    return END in template


class Think(MessageParser):
    """The parser of the text up to `</think>`; another one parses what follows.

    An answer that does not begin with `<think>` has no reasoning, unless the prompt has begun it.
    """

    def __init__(self, rest: MessageParser, *, is_begun: bool) -> None:
        """Put the parser in front of `rest`; `is_begun`: the prompt ends inside the tags."""
        self._rest = rest
        self._text = ""
        self._state = "inside" if is_begun else "before"
        self._drops_line_breaks = is_begun

    def feed(self, text: str) -> MessageDelta:
        self._text += text
        if self._state == "before":
            begun = self._text.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return MessageDelta()
            self._state = "inside" if begun.startswith(BEGIN) else "after"
            self._text = begun.removeprefix(BEGIN) if self._state == "inside" else self._text
            self._drops_line_breaks = self._state == "inside"
        found = MessageDelta()
        if self._state == "inside":
            inside, tag, rest = self._without_line_breaks().partition(END)
            length = len(inside) - (0 if tag else held_back(inside, (END,)))
            found.reasoning, self._text = inside[:length], inside[length:]
            if tag:
                self._text, self._state, self._drops_line_breaks = rest, "after", True
        if self._state == "after" and (answer := self._without_line_breaks()):
            self._text = ""
            found += self._rest.feed(answer)
        return found

    def finish(self) -> MessageDelta:
        text, self._text = self._text, ""
        if self._state == "inside":
            return MessageDelta(reasoning=text)
        before = self._rest.feed(text) if text else MessageDelta()
        return before + self._rest.finish()

    def _without_line_breaks(self) -> str:
        """Return the text without the line breaks behind a tag, which belong to neither side."""
        if self._drops_line_breaks:
            self._text = self._text.lstrip("\n")
            self._drops_line_breaks = not self._text
        return self._text
