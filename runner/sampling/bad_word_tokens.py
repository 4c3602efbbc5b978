"""Bad words as the tokens that would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from piecegraph.errors import RequestError


class Encoder(Protocol):
    """The one thing that is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def bad_words_token_ids(tokenizer: Encoder, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to forbid, at least one a word.

    A word is forbidden as it is tokenized at the start of a text and, where that is another first token and
    as many tokens, after a space, as in vLLM. Raises `RequestError` for a word that makes no tokens.
    """
    forbidden: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not plain:
            raise RequestError(f"bad_words={word!r}; it must be text that makes a token at least.")
        forbidden.append(plain)
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            forbidden.append(spaced)
    return tuple(forbidden)
