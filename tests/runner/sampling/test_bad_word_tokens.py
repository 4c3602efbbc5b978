"""A bad word is forbidden as a text would begin with it, and as it follows a space where that differs."""

from __future__ import annotations

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.sampling.bad_word_tokens import bad_words_token_ids
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


def test_with_and_without_a_space() -> None:
    """The space counts if it makes another first token and no more of them; spaces before the word do not."""
    assert bad_words_token_ids(Words(), ["the", "  dog", "mana"]) == ((0,), (1,), (2,), (3,), (4, 5))
    assert bad_words_token_ids(Words(), ["the dog"]) == ((0, 3), (1, 3))
    assert bad_words_token_ids(Words(), []) == ()


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="bad_words=' '; it must be text that makes a token at least"):
        bad_words_token_ids(Words(), ["the", " "])


def test_with_a_tokenizer_of_transformers() -> None:
    tokenizer = byte_tokenizer()
    found = bad_words_token_ids(tokenizer, ["the"])
    assert [tokenizer.decode(list(tokens)) for tokens in found] == ["the", " the"]
