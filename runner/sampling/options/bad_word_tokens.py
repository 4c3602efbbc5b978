"""The token sequences that spell a bad word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from piecegraph.errors import RequestError


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""


def bad_words_token_ids(tokenizer: Encoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid, at least one a word.

    A word is forbidden as it is tokenized at the start of a text, after a space, and after a space in running text,
    however many tokens that takes; a sequence that ends with another one of the same word is left out. vLLM forbids
    the form after a space only if it has as many tokens as the other, which permits words that are one token there
    and several at a start. Leading spaces of a word are ignored. Raises `RequestError` for a word that
    makes no tokens.
    """
    forbidden: list[tuple[int, ...]] = []
    before = tuple(tokenizer.encode(_TEXT_BEFORE, add_special_tokens=False))
    for word in words:
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        if not plain:
            raise RequestError(f"bad_words={word!r}; it must be text that makes a token at least.")
        forms = [plain, tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))]
        running = tuple(tokenizer.encode(f"{_TEXT_BEFORE} {bare}", add_special_tokens=False))
        if running[: len(before)] == before:
            forms.append(running[len(before) :])
        forbidden += _without_longer(forms)
    return tuple(forbidden)


_TEXT_BEFORE = "a"
"""The text before a word in running text; tokenizers that mark the first word of a text mark this one instead."""


def _without_longer(forms: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the forms that end with no other form, each once: forbidding a suffix forbids the whole."""
    kept = list(dict.fromkeys(form for form in forms if form))
    return [form for form in kept if not any(form != end and form[-len(end) :] == end for end in kept)]
