from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.structured_output.grammars import GrammarState
from piecegraph.runner.structured_output.llguidance_backend import LLGuidanceBackend
from piecegraph.runner.structured_output.params import StructuredOutputsParams
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.structured_output.random_outputs import allowed_tokens, random_output

VOCAB_SIZE = 300
"""More than the tokenizer's 261: a model's vocabulary is padded."""

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[1])


def outputs(backend: LLGuidanceBackend, count: int = 5, **fields: Any) -> list[str]:
    matcher = backend.compile(StructuredOutputsParams(**fields))
    return [random_output(GrammarState(matcher.copy()), TOKENIZER, VOCAB_SIZE, seed) for seed in range(count)]


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", 1, None, True]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "string", "pattern": "^[a-f]{2,5}$"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"const": {"a": [1, {"b": "c"}]}},
    {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "required": ["next"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    },
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["a"]}], "items": False, "minItems": 2},
    {"type": "string", "format": "date"},
    {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_json_follows_its_schema(backend: LLGuidanceBackend, schema: Any) -> None:
    """As a dictionary and as text, with and without whitespace; another package checks it."""
    for text in outputs(backend, json=schema) + outputs(backend, json=json.dumps(schema), disable_any_whitespace=True):
        jsonschema.validate(json.loads(text), schema)


def test_whitespace_comes_to_an_end(backend: LLGuidanceBackend) -> None:
    """A model that likes line breaks gets twenty of them; the request may ask for none, or for a form of its own."""
    schema = SCHEMAS[0]
    assert all(max(map(len, re.findall(r"\s+", text)), default=0) <= 20 for text in outputs(backend, json=schema))
    assert all(re.fullmatch(r'\{"a":-?\d+\}', t) for t in outputs(backend, json=schema, disable_any_whitespace=True))
    spaced = outputs(backend, json=schema, whitespace_pattern=" ?")
    assert all(re.fullmatch(r'\{ ?"a" ?: ?-?\d+ ?\}', text) for text in spaced)


def test_additional_properties_may_be_disabled(backend: LLGuidanceBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    for text in outputs(backend, json=schema, disable_additional_properties=True):
        assert set(json.loads(text)) <= {"a"}


def test_other_forms(backend: LLGuidanceBackend) -> None:
    """A regular expression, a choice with characters to escape, and grammars in both notations."""
    assert all(re.fullmatch(r"[a-c]{2,4}z", text) for text in outputs(backend, regex="[a-c]{2,4}z"))
    choices = ['say "yes"', "no\n", "viel Glück", "back\\slash"]
    assert set(outputs(backend, 30, choice=choices)) == set(choices)
    assert set(outputs(backend, 20, grammar='start: "a" b\nb: "x" | "y"')) == {"ax", "ay"}
    assert set(outputs(backend, 20, grammar='root ::= "a" b\nb ::= "x" | "y"')) == {"ax", "ay"}


def test_a_structural_tag_begins_json_in_free_text(backend: LLGuidanceBackend) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMAS[0], "end": "</f>"}], "triggers": ["<f"]}
    state = GrammarState(backend.compile(StructuredOutputsParams(structural_tag=tag)))
    tokens = [*TOKENIZER("any text ")["input_ids"]]
    state.advance(tokens)
    assert len(allowed_tokens(state, VOCAB_SIZE)) > 150
    tokens += TOKENIZER('<f>{"a"')["input_ids"]
    state.advance(tokens)
    assert set(TOKENIZER.decode(allowed_tokens(state, VOCAB_SIZE))) <= set(": \n\r\t")
    state.advance([*tokens, *TOKENIZER(":7}</f>")["input_ids"]])
    assert 1 in allowed_tokens(state, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "json is not JSON"),
        ({"json": {"type": "strin"}}, "cannot be compiled"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": "7"}, "a schema is an object"),
        ({"regex": "(ab"}, "unclosed group"),
        ({"grammar": "x ::="}, "cannot be compiled"),
        ({"structural_tag": {"structures": []}}, "structural_tag must be"),
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["c"]}}, "starts with no trigger"),
    ],
)
def test_what_cannot_be_compiled_is_refused(backend: LLGuidanceBackend, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        backend.compile(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    "fields", [{"regex": "\ud800"}, {"choice": ["\ud800"]}, {"regex": "(" * 5000 + "a" + ")" * 5000}]
)
def test_what_the_library_cannot_read_is_refused(backend: LLGuidanceBackend, fields: dict[str, Any]) -> None:
    """Half of a surrogate pair, which is no text, and groups that are nested too deeply."""
    with pytest.raises(RequestError, match="structured_outputs cannot be compiled"):
        backend.compile(StructuredOutputsParams(**fields))


def test_a_schema_that_is_nested_too_deeply_is_refused(backend: LLGuidanceBackend) -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        StructuredOutputsParams(json=schema)


EXPLODING = "((a{100}){100}){30}"
"""llguidance's own limits let it take most of a second for each token, without an error."""


def test_a_regex_that_explodes_is_refused_where_it_is_compiled(backend: LLGuidanceBackend) -> None:
    """No step meets it: its first mask, which reaches a limit, is asked for here."""
    with pytest.raises(RequestError, match="too many expressions"):
        backend.compile(StructuredOutputsParams(regex=f"x{EXPLODING}"))


def test_what_cannot_be_followed_from_the_start_is_refused(backend: LLGuidanceBackend) -> None:
    """More alternatives than the library has room for; a request of it would only fail in a step."""
    names = [f"name {number}" for number in range(700)]
    with pytest.raises(RequestError, match="Current row has"):
        backend.compile(StructuredOutputsParams(json={"properties": {name: {} for name in names}, "type": "object"}))


def test_ten_thousand_choices(backend: LLGuidanceBackend) -> None:
    choices = [f"number {number} of {number + 1}" for number in range(10_000)]
    assert set(outputs(backend, 20, choice=choices)) <= set(choices)


def test_a_choice_that_another_begins_with(backend: LLGuidanceBackend) -> None:
    """It may end there, or go on."""
    state = GrammarState(backend.compile(StructuredOutputsParams(choice=["a", "abc", "ab", "b"])))
    for text, following in (("a", "b"), ("ab", "c")):
        state.advance(TOKENIZER(text)["input_ids"])
        assert allowed_tokens(state, VOCAB_SIZE) == [1, *TOKENIZER(following)["input_ids"]]


def test_a_grammar_that_was_left_can_be_followed_again_from_the_start(backend: LLGuidanceBackend) -> None:
    """As a step that is computed again follows it; llguidance's own reset would leave it in error."""
    state = GrammarState(backend.compile(StructuredOutputsParams(regex="ab")).copy())
    first = allowed_tokens(state, VOCAB_SIZE)
    with pytest.raises(RequestError, match="left its grammar"):
        state.advance([0])
    state.start_over()
    assert allowed_tokens(state, VOCAB_SIZE) == first == TOKENIZER.encode("a", add_special_tokens=False)
    state.advance(TOKENIZER.encode("ab", add_special_tokens=False))
    assert state.is_stopped
