"""A bad word is forbidden as a text would begin with it, and as it follows a space where that differs."""

from __future__ import annotations

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.sampling.options.bad_word_tokens import bad_words_token_ids
from tests.runner.byte_tokenizer import byte_tokenizer


class Words:
    """A token a word, with the space before it as a token of its own kind."""

    vocabulary = ("the", " the", "dog", " dog", "ma", "na")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        tokens = []
        while text:
            at = next((i for i, word in enumerate(self.vocabulary) if text.startswith(word)), None)
            if at is not None:
                tokens.append(at)
            text = text[len(self.vocabulary[at]) if at is not None else 1 :]
        return tokens


def test_a_word_is_forbidden_with_and_without_a_space() -> None:
    """The space counts if it makes other tokens; spaces before the word do not."""
    assert bad_words_token_ids(Words(), ["the", "  dog", "mana"]) == ((0,), (1,), (2,), (3,), (4, 5))
    assert bad_words_token_ids(Words(), ["the dog"]) == ((0, 3), (1, 3))
    assert bad_words_token_ids(Words(), []) == ()


class Bananas(Words):
    """A word that is one token after a space and several at a start, and one the other way round."""

    vocabulary = ("ban", "ana", " banana", "kiwi", " ki", "wi")


def test_the_form_after_a_space_counts_whatever_its_length() -> None:
    assert bad_words_token_ids(Bananas(), ["banana", "kiwi"]) == ((0, 1), (2,), (3,), (4, 5))


class Marked(Words):
    """As SentencePiece's: the first word of a text has the mark of a space too."""

    vocabulary = ("\u2581\u2581", "\u2581the", "\u2581a", "\u2581", "the", "a")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode("\u2581" + text.replace(" ", "\u2581"), add_special_tokens=add_special_tokens)


def test_a_word_is_forbidden_if_the_tokenizer_marks_the_first_word() -> None:
    """Two spaces are no running text, but forbidding them does no harm."""
    assert bad_words_token_ids(Marked(), ["the"]) == ((1,), (0, 4))


def test_what_ends_with_a_forbidden_sequence_is_not_forbidden_twice() -> None:
    assert [len(tokens) for tokens in bad_words_token_ids(byte_tokenizer(), ["he"])] == [2]


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="bad_words=' '; it must be text that makes a token at least"):
        bad_words_token_ids(Words(), ["the", " "])


def test_a_tokenizer_of_transformers_can_be_used() -> None:
    tokenizer = byte_tokenizer()
    found = bad_words_token_ids(tokenizer, ["the"])
    assert [tokenizer.decode(list(tokens)) for tokens in found] == ["the", " the"]
