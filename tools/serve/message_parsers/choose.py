"""The parsers of a model's answers, chosen by its chat template."""

from __future__ import annotations

from piecegraph.tools.serve.message_parsers.hermes import Hermes
from piecegraph.tools.serve.message_parsers.llama import Llama
from piecegraph.tools.serve.message_parsers.mistral import Mistral
from piecegraph.tools.serve.message_parsers.protocol import MessageParser, PlainText, ToolFormat
from piecegraph.tools.serve.message_parsers.think import BEGIN, Think, is_thinking

TOOL_FORMATS: tuple[ToolFormat, ...] = (Hermes(), Mistral(), Llama())
"""The formats of tool calls; the first one that recognises a chat template is taken, so the strictest come first."""


def tool_format(template: str) -> ToolFormat:
    """Return the format in which a model with this chat template writes tool calls; Hermes's if none recognises it."""
    return next((each for each in TOOL_FORMATS if each.is_format_of(template)), TOOL_FORMATS[0])


def message_parser(template: str, prompt: str, tools: ToolFormat | None) -> MessageParser:
    """Return a parser of the answer to `prompt`; `tools`: the form of calls, None if no tool may be called."""
    parser = PlainText() if tools is None else tools.parser()
    if not is_thinking(template):
        return parser
    return Think(parser, is_begun=prompt.rstrip().endswith(BEGIN))
