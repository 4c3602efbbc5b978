"""Text grows by whole characters, is exactly what decoding everything gives, and ends at stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.detokenizer import Detokenizer
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


@given(st.text(max_size=12), st.text(max_size=24))
def test_text_is_what_was_encoded(prompt: str, answer: str) -> None:
    """For any text after any prompt, and never a broken character on the way."""
    detokenizer = Detokenizer(TOKENIZER, encode(prompt))
    for token in encode(answer):
        detokenizer.append(token)
        assert answer.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == answer


@given(st.lists(st.integers(2, 260), max_size=40))
def test_any_bytes_decode_as_a_whole_would(tokens: list[int]) -> None:
    """Tokens that are no text at all included: what cannot be a character becomes U+FFFD."""
    detokenizer = Detokenizer(TOKENIZER, [])
    for token in tokens:
        detokenizer.append(token)
    detokenizer.finish()
    assert detokenizer.text == TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)


def test_an_incomplete_character_waits() -> None:
    detokenizer = Detokenizer(TOKENIZER, encode("x"))
    seen = []
    for token in encode("a€"):
        detokenizer.append(token)
        seen.append(detokenizer.text)
    assert seen == ["a", "a", "a", "a€"]


def test_a_character_never_completed_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    for token in encode("a€")[:-1]:
        detokenizer.append(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one the end")])
def test_a_stop_string_across_tokens_cuts_the_text(include: bool, text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop_strings=["nope", "the end"], include_stop_string=include)
    found = [detokenizer.append(token) for token in encode("one the end of it")]
    assert next(stop for stop in found if stop) == "the end"
    at = next(i for i, stop in enumerate(found) if stop)
    again = Detokenizer(TOKENIZER, [], stop_strings=["nope", "the end"], include_stop_string=include)
    for token in encode("one the end of it")[: at + 1]:
        again.append(token)
    assert again.text == text


def test_the_first_of_several_stop_strings_counts() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop_strings=["e", "the"])
    assert [stop for token in encode("the") if (stop := detokenizer.append(token))] == ["the"]
    assert detokenizer.text == ""


def test_settled_text_is_never_taken_back() -> None:
    """What streams out holds back as much as a stop string could still cut."""
    detokenizer = Detokenizer(TOKENIZER, [], stop_strings=["<end>"])
    settled = []
    for token in encode("ab<enx<end>"):
        if detokenizer.append(token) is None:
            settled.append(detokenizer.settled_text())
    assert all(detokenizer.text.startswith(text) for text in settled)
    assert detokenizer.text == "ab<enx"


def test_special_tokens_are_skipped_or_shown() -> None:
    for skip, text in ((True, "hi"), (False, "hi</s>")):
        detokenizer = Detokenizer(TOKENIZER, encode("x"), skip_special_tokens=skip)
        for token in [*encode("hi"), 1]:
            detokenizer.append(token)
        detokenizer.finish()
        assert detokenizer.text == text
