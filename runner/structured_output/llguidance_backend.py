"""Grammars by llguidance, which derives the masks of a step from the grammar itself, without a table per grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from piecegraph.errors import RequestError
from piecegraph.runner.structured_output.params import StructuredOutputsParams, parsed
from piecegraph.runner.structured_output.protocol import Bitmask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

WHITESPACE = r"[ \n\r\t]{0,20}"
"""Whitespace in JSON unless a request says otherwise: bounded, because small models write line breaks for ever."""

LEAST_LEXER_FUEL = 100_000
MOST_LEXER_FUEL = 1_000_000
"""The limits of what llguidance may spend on the expressions of a grammar's terminals, in its own unit: one for each
character besides the least. The most is the library's default. A regex of a few characters that explodes behind its
start would hold up a step for seconds with that, and for tenths of a second with the least."""


class LLGuidanceMatcher:
    """The progress of one output, kept by an `LLMatcher`, which raises nothing and remembers its first error."""

    def __init__(self, matcher: LLMatcher, start: LLMatcher | None = None) -> None:
        """`start`: a matcher at the start of the output, which is only copied; None: `matcher` is there."""
        self._matcher = matcher
        self._start = matcher.deep_copy() if start is None else start

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._start)

    def accept(self, token_ids: Sequence[int]) -> str | None:
        if self._matcher.consume_tokens(list(token_ids)):
            return None
        # What follows the semicolon depends on whether a mask was computed before.
        text = self._matcher.get_error().partition("\n")[0].partition(";")[0]
        return text or "the grammar allows no such token"

    def rollback(self, count: int) -> None:
        is_done = self._matcher.rollback(count)
        assert is_done, f"{count} tokens cannot be taken back: {self._matcher.get_error()}"

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> str | None:
        words = bitmask[row]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.size * words.itemsize)
        # In error the library would let nothing but an EOS token come, as if the output were complete.
        return _first_lines(self._matcher.get_error()) if self._matcher.is_error() else None

    def is_stopped(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def reset(self) -> None:
        if self._matcher.is_error():  # the library's own reset would leave it so
            self._matcher = self._start.deep_copy()
        else:
            self._matcher.reset()


class LLGuidanceBackend:
    """The compiler of grammars for one tokenizer. Raises `RequestError` if llguidance cannot use the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Read the tokenizer's vocabulary; `vocab_size` is the model's, which may be larger."""
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestError(
                'structured_outputs need llguidance, which is not installed: pip install "piecegraph[structured]".'
            ) from error
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(
                tokenizer,  # type: ignore[arg-type]  # it raises for any but a fast one
                n_vocab=max(vocab_size, len(tokenizer)),
                eos_token=sorted(eos_token_ids) or None,
            )
        except Exception as error:  # llguidance raises types of its own
            raise RequestError(
                f"structured_outputs are not available with this tokenizer: llguidance refuses it ({error})."
            ) from error
        self._kind, self._limits = LLMatcher, LLParserLimits
        self._num_words = -(-max(vocab_size, len(tokenizer)) // 32)  # of a mask

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceMatcher:
        try:
            grammar = self._grammar(params)
            fuel = min(MOST_LEXER_FUEL, LEAST_LEXER_FUEL + len(grammar))
            matcher = self._kind(
                self._tokenizer,
                grammar,
                log_level=0,
                limits=self._limits(initial_lexer_fuel=fuel, verbose_errors=False),
            )
        except (RequestError, MemoryError):
            raise
        except BaseException as error:  # a panic in the Rust library is a BaseException
            text = _first_lines(str(error))
            raise RequestError(f"structured_outputs cannot be compiled: {type(error).__name__}: {text}") from error
        if matcher.is_error():
            raise RequestError(f"structured_outputs cannot be compiled: {_first_lines(matcher.get_error())}")
        made = LLGuidanceMatcher(matcher)
        reason = self._try_first_token(made)
        if reason is not None:
            raise RequestError(f"structured_outputs cannot be compiled: {_first_lines(reason)}")
        return made

    def _try_first_token(self, matcher: LLGuidanceMatcher) -> str | None:
        """Return why the first token cannot be constrained, or a token that may come first not be accepted, or None.

        What explodes at its start reaches the limits of the library here, and not in a step.
        """
        mask = np.zeros((1, self._num_words), np.int32)
        tried = matcher.copy()
        reason = tried.fill_bitmask(mask, 0)
        words = mask.view(np.uint32)[0]
        (places,) = words.nonzero()
        if reason is not None or not len(places):
            return reason
        return tried.accept([32 * int(places[0]) + int(words[places[0]]).bit_length() - 1])

    def _grammar(self, params: StructuredOutputsParams) -> str:
        if params.regex is not None:
            return self._kind.grammar_from_regex(params.regex)
        if params.choice is not None:
            texts = " | ".join(json.dumps(text) for text in params.choice)
            return self._kind.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # a terminal may have any number
        if params.grammar is not None:
            return self._lark(params.grammar)
        if params.structural_tag is not None:
            return self._tags(params)
        schema = params.json_schema
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise RequestError(f"structured_outputs: json={schema!r}; a schema is an object, true or false.")
        if params.disable_additional_properties:
            schema = _closed(schema)
        return self._kind.grammar_from_json_schema(dict(schema), overrides=_json_options(params))

    def _lark(self, text: str) -> str:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return self._kind.grammar_from_lark(any_to_lark(text))
        except Exception as error:  # llguidance raises types of its own
            raise RequestError(f"structured_outputs cannot be compiled: grammar is not GBNF ({error}).") from error

    def _tags(self, params: StructuredOutputsParams) -> str:
        from llguidance import StructTag

        given = parsed("structural_tag", params.structural_tag)
        wanted = '{"structures": [{"begin": text, "schema": schema, "end": text}], "triggers": [text]}'
        try:
            structures, triggers = given["structures"], given["triggers"]
            tags = []
            for each in structures:
                begin, end, schema = each["begin"], each["end"], each.get("schema", {})
                trigger = next(trigger for trigger in triggers if trigger and begin.startswith(trigger))
                grammar = {**schema, "x-guidance": _json_options(params)}
                tags.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end))
            # A trigger is matched as text, unless the tokenizer has it as one special token.
            is_special = all(len(self._special(tag.trigger)) == 1 for tag in tags)
            return StructTag.to_grammar(tags, assume_special=is_special)
        except StopIteration:
            raise RequestError("structured_outputs: structural_tag has a begin that starts with no trigger.") from None
        except (AssertionError, AttributeError, KeyError, TypeError) as error:
            raise RequestError(f"structured_outputs: structural_tag must be {wanted}.") from error

    def _special(self, text: str) -> list[int]:
        """Return the special tokens that `text` consists of; empty if it has any other."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return tokens if all(self._tokenizer.is_special_token(token) for token in tokens) else []


def _json_options(params: StructuredOutputsParams) -> Any:
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    elif not params.disable_any_whitespace:
        options["whitespace_pattern"] = WHITESPACE
    return options


def _closed(schema: Any) -> Any:
    """Return a copy of a schema that allows only named properties, except where it says which others it allows."""
    if isinstance(schema, Mapping):
        made = {name: _closed(value) for name, value in schema.items()}
        if "properties" in schema and "additionalProperties" not in schema and "patternProperties" not in schema:
            made["additionalProperties"] = False
        return made
    return [_closed(value) for value in schema] if isinstance(schema, list) else schema


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:500]
