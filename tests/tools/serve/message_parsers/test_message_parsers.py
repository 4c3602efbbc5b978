"""The parsers of answers: hermes, llama, mistral, think, and how one is chosen."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from piecegraph.tools.serve.message_parsers.choose import TOOL_FORMATS, message_parser, tool_format
from piecegraph.tools.serve.message_parsers.hermes import Hermes, HermesParser
from piecegraph.tools.serve.message_parsers.llama import Llama, LlamaParser
from piecegraph.tools.serve.message_parsers.mistral import Mistral, MistralParser
from piecegraph.tools.serve.message_parsers.protocol import MessageDelta, MessageParser, PlainText, ToolFormat
from piecegraph.tools.serve.message_parsers.think import Think

CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
SECOND = '{"name": "now", "arguments": {}}'
ARGUMENTS = {"a": 1, "b": [2, "}"]}


def parsed(parser: MessageParser, text: str, seed: int | None = None) -> MessageDelta:
    """Feed `text` whole, or in pieces of random sizes."""
    found, source, at = MessageDelta(), random.Random(seed), 0
    while at < len(text):
        size = len(text) if seed is None else source.randint(1, 9)
        found += parser.feed(text[at : at + size])
        at += size
    return found + parser.finish()


def simple(delta: MessageDelta) -> tuple[str, str, list[tuple[str, Any]]]:
    return delta.content, delta.reasoning, [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]


CASES: list[tuple[type[MessageParser], str, str, list[tuple[str, Any]]]] = [
    (HermesParser, "Just <text> with a <tool", "Just <text> with a <tool", []),
    (HermesParser, f"Well.\n<tool_call>\n{CALL}\n</tool_call>", "Well.\n", [("add", ARGUMENTS)]),
    (
        HermesParser,
        f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>",
        "",
        [("add", ARGUMENTS), ("now", {})],
    ),
    (HermesParser, f"<tool_call>{CALL}", "", [("add", ARGUMENTS)]),
    (HermesParser, "<tool_call>no JSON</tool_call> end", "<tool_call>no JSON</tool_call> end", []),
    (HermesParser, '<tool_call>{"a": ', '<tool_call>{"a": ', []),
    (MistralParser, "Just [TOOL] text", "Just [TOOL] text", []),
    (MistralParser, f"Well.[TOOL_CALLS] [{CALL}, {SECOND}]", "Well.", [("add", ARGUMENTS), ("now", {})]),
    (MistralParser, "[TOOL_CALLS] [{", "[TOOL_CALLS] [{", []),
    (LlamaParser, "Just {text}", "Just {text}", []),
    (LlamaParser, CALL.replace("arguments", "parameters"), "", [("add", ARGUMENTS)]),
    (LlamaParser, f"<|python_tag|>{CALL}; {SECOND}", "", [("add", ARGUMENTS), ("now", {})]),
    (LlamaParser, '{"no": "call"}', '{"no": "call"}', []),
    (LlamaParser, "{", "{", []),
    (PlainText, "<tool_call>", "<tool_call>", []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_content_and_calls_are_found(
    parser: type[MessageParser], text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    """Whole, and in pieces of any size; what is no call is content as it was written."""
    assert simple(parsed(parser(), text)) == (content, "", calls)
    for seed in range(20):
        assert simple(parsed(parser(), text, seed)) == (content, "", calls)


def test_content_is_not_held_back_longer_than_needed() -> None:
    """Only what may be the beginning of a marker waits."""
    parser = HermesParser()
    assert parser.feed("a <to").content == "a "
    assert parser.feed("p").content == "<top"


@pytest.mark.parametrize(
    ("text", "is_begun", "content", "reasoning"),
    [
        ("<think>\nwhy\n</think>\n\nBecause.", False, "Because.", "why\n"),
        ("why</think>Because.", True, "Because.", "why"),
        ("No reasoning. </think>", False, "No reasoning. </think>", ""),
        ("<think>without an end", False, "", "without an end"),
        ("<thi", False, "<thi", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, is_begun: bool, content: str, reasoning: str) -> None:
    for seed in (None, *range(20)):
        found = parsed(Think(PlainText(), is_begun=is_begun), text, seed)
        assert (found.content, found.reasoning) == (content, reasoning)


def test_calls_may_follow_reasoning() -> None:
    for seed in range(20):
        parser = Think(HermesParser(), is_begun=False)
        found = parsed(parser, f"<think>hm</think>\n<tool_call>{CALL}</tool_call>", seed)
        assert simple(found) == ("", "hm", [("add", ARGUMENTS)])


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("... <tool_call> ...", Hermes),
        ("... [TOOL_CALLS] ...", Mistral),
        ("... <|python_tag|> ...", Llama),
        ("{{ messages }}", Hermes),
    ],
)
def test_the_template_chooses_the_form(template: str, kind: type[ToolFormat]) -> None:
    assert type(tool_format(template)) is kind
    parser = message_parser(template + "</think>", "<assistant><think>\n", tool_format(template))
    assert isinstance(parser, Think)
    assert parser.feed("hm").reasoning == "hm"


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_forced_call_is_one_that_the_parser_finds(form: ToolFormat) -> None:
    """Random tokens that follow the grammar make up calls with arguments of the schema; references lead home."""
    import jsonschema

    from piecegraph.runner.structured_output.grammars import GrammarState
    from piecegraph.runner.structured_output.llguidance_backend import LLGuidanceBackend
    from piecegraph.runner.structured_output.params import StructuredOutputsParams
    from tests.runner.byte_tokenizer import byte_tokenizer
    from tests.runner.structured_output.random_outputs import random_output

    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Paris", "Rome"]}},
    }
    tools: list[dict[str, Any]] = [{"name": "weather", "parameters": parameters}, {"name": "now"}]
    tokenizer = byte_tokenizer()
    backend = LLGuidanceBackend(tokenizer, vocab_size=261, eos_token_ids=[1])
    for many in (False, True):
        matcher = backend.compile(StructuredOutputsParams(grammar=form.grammar(tools, special={}, many=many)))
        for seed in range(10):
            text = random_output(GrammarState(matcher.copy()), tokenizer, 261, seed)
            found = parsed(form.parser(), text)
            assert found.tool_calls, text
            assert not found.content
            assert many or len(found.tool_calls) == 1
            for call in found.tool_calls:
                if call.name == "weather":
                    jsonschema.validate(json.loads(call.arguments), parameters)
                else:
                    assert call.name == "now"
