"""Text grows by whole characters, is exactly what decoding everything gives, and ends at stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from piecegraph.runner.output.detokenizer import Detokenizer
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece's: spaces are "▁", the first is dropped, and other bytes have tokens of their own."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcé", "▁a", "ab", "€"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


FALLBACK_TOKENIZER = fallback_tokenizer()
FIRST_CHARACTER = 258  # of its tokens that are no bytes


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


@given(st.text(max_size=8), st.lists(st.integers(0, 260), max_size=60), st.booleans())
def test_any_tokens_decode_as_a_whole_would(prompt: str, tokens: list[int], skip: bool) -> None:
    """Tokens that are no text at all included: what cannot be a character becomes U+FFFD. One by one or at the
    end in one go, it is the same text; and what was seen on the way is its beginning."""
    given = encode(prompt)
    streamed = Detokenizer(TOKENIZER, given, skip_special_tokens=skip)
    seen = []
    for token in tokens:
        assert streamed.append(token) is None
        seen.append(streamed.text)
    streamed.finish()
    late = Detokenizer(TOKENIZER, given, skip_special_tokens=skip)
    late.add_unread(tokens)
    late.finish()
    assert streamed.text == late.text == TOKENIZER.decode(tokens, skip_special_tokens=skip)
    assert all(streamed.text.startswith(text) for text in seen)


@given(st.lists(st.integers(FIRST_CHARACTER, FIRST_CHARACTER + 7) | st.text(max_size=3), max_size=30))
def test_decoders_that_drop_a_space_or_fall_back_to_bytes(parts: list[int | str]) -> None:
    """Words that begin with a space, characters written in bytes, any number of both: one by one or in one go."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [2 + byte for byte in part.encode()]
    streamed, late = (Detokenizer(FALLBACK_TOKENIZER, [FIRST_CHARACTER + 1]) for _ in range(2))
    for token in tokens:
        streamed.append(token)
    streamed.finish()
    late.add_unread(tokens)
    late.finish()
    whole = FALLBACK_TOKENIZER.decode([FIRST_CHARACTER + 1, *tokens])
    assert "a" + streamed.text == "a" + late.text == whole


class Counting(PreTrainedTokenizerFast):
    """Counts the tokens it decodes."""

    num_decoded = 0

    def _decode(self, token_ids: Any, *arguments: Any, **options: Any) -> str:
        type(self).num_decoded += len(token_ids)
        return super()._decode(token_ids, *arguments, **options)


TOKENS_WITHOUT_TEXT = {
    "special": [1],
    "unknown": [999],
    "no character": [2 + 0x80],
    "a character that never ends": [2 + 0xF0, 2 + 0x9F],
    "a special token within a character": [2 + 0xE2, 1, 2 + 0x82, 2 + 0xAC],
    "U+FFFD itself": [2 + byte for byte in "\ufffd".encode()],
}


@pytest.mark.parametrize("name", TOKENS_WITHOUT_TEXT)
@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_tokens_without_text_cost_no_more_than_others(name: str, make: Any) -> None:
    """Few tokens are decoded for each that comes, however many make no text; and the text is that of all at once."""
    repeated = TOKENS_WITHOUT_TEXT[name]
    tokenizer = Counting(tokenizer_object=make().backend_tokenizer)  # type: ignore[no-untyped-call]
    prompt, tokens = tokenizer.encode("a")[-1:], (repeated * 408)[:408]
    detokenizer = Detokenizer(tokenizer, prompt)
    Counting.num_decoded = 0
    for token in tokens:
        detokenizer.append(token)
    assert Counting.num_decoded < 80 * len(tokens)
    detokenizer.finish()
    assert detokenizer.text == make().decode([*prompt, *tokens], skip_special_tokens=True)[1:]


@settings(max_examples=40)
@given(st.text("ab é€", max_size=3), st.lists(st.integers(0, 300) | st.just(1), min_size=20, max_size=90))
def test_long_runs_of_anything_decode_as_a_whole_would(prompt: str, seed: list[int]) -> None:
    """Runs of the same few tokens, so that the window has to be cut in all places."""
    tokens = [token for token in seed for _ in range(token % 7)]
    given = encode(prompt)
    detokenizer = Detokenizer(TOKENIZER, given)
    seen = []
    for token in tokens:
        detokenizer.append(token)
        seen.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert all(detokenizer.text.startswith(text) for text in seen)


class Loud(PreTrainedTokenizerFast):
    def _decode(self, *arguments: Any, **options: Any) -> str:
        return super()._decode(*arguments, **options).upper()


def test_a_tokenizer_that_overrides_decode_is_called() -> None:
    detokenizer = Detokenizer(Loud(tokenizer_object=TOKENIZER.backend_tokenizer), [])  # type: ignore[no-untyped-call]
    for token in encode("the end"):
        detokenizer.append(token)
    assert detokenizer.text == "THE END"


@pytest.mark.parametrize(("min_tokens", "at"), [(0, 2), (1, 2), (2, 2), (3, 5), (4, 5), (5, 5)])
def test_no_stop_string_is_found_that_ends_in_the_first_tokens(min_tokens: int, at: int) -> None:
    """One that begins in them and ends after them is."""
    detokenizer = Detokenizer(TOKENIZER, [], stop_strings=["ab"], min_tokens=min_tokens)
    found = [detokenizer.append(token) for token in encode("xabcab")]
    assert found.index("ab") == at


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


@pytest.mark.parametrize(
    ("stop_strings", "found", "text"),
    [(["e", "the"], "e", "th"), (["the", "e"], "the", ""), (["the", "h"], "h", "t")],
)
def test_the_stop_string_that_ends_first_counts_then_the_order(stop_strings: list[str], found: str, text: str) -> None:
    (token,) = (token for token in range(256, len(TOKENIZER)) if TOKENIZER.decode([token]) == "the")
    for tokens in (encode("the"), [token]):
        detokenizer = Detokenizer(TOKENIZER, [], stop_strings=stop_strings)
        assert next(stop for one in tokens if (stop := detokenizer.append(one))) == found
        assert detokenizer.text == text


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
