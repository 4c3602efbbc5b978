"""Incremental detokenization, exact for characters that span tokens, with stop strings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from piecegraph.runner.output.stop_strings import find_stop_string

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_TAIL = 6
"""Prompt tokens decoded along with the first output tokens: some decoders drop a space at the start."""

_LONGEST_WINDOW = 4
"""Tokens that are decoded again with each new token. Shortening the window costs a second decoding, so it is not done
at each token."""

_MOST_PENDING = 12
"""Tokens that may wait for the rest of a character. A character has at most `_LONGEST_CHARACTER` bytes, and a token
has at least one, so a longer wait is mostly useless."""

_LONGEST_CHARACTER = 4
"""The most bytes of a character in UTF-8."""

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The decoder of one request's output. `text` grows by whole characters only, and is never taken back.

    Each new token is decoded together with a window of the tokens before it, and the difference is kept once it
    does not end inside a character [the scheme of text-generation-inference and vLLM]. The window is bounded whatever
    tokens come: special tokens that are left out of the text, and tokens that the tokenizer does not have, never stay
    in it, and of many tokens that form no character all but the last few are settled as they are. The text equals that
    of decoding all tokens at once, with one exception: decoders with byte fallback (SentencePiece's) replace a whole
    run of byte tokens by U+FFFD if any of it is not a character, and some of that run may have been delivered.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Start after a prompt. A stop string that ends within the text of the first `min_tokens` tokens is ignored."""
        self.text = ""
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._num_unsearched = min_tokens  # tokens that are still to come
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._is_unknown = _unknown(tokenizer)
        self._left_out = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window = [token for token in prompt_token_ids[-_PROMPT_TAIL:] if token not in self._left_out]
        self._num_settled = len(self._window)  # of the window's tokens; their text is in `text`, or the prompt's
        self._settled = self._decode(self._window)
        self._most_pending = _MOST_PENDING

    def append(self, token_id: int) -> str | None:
        """Add a token; return the stop string that it completes, which also cuts `text`, or None."""
        self._num_unsearched -= 1
        if token_id in self._left_out:
            return None
        self._window.append(token_id)
        decoded = self._decode(self._window)
        if len(decoded) <= len(self._settled) or decoded.endswith(_INCOMPLETE):
            if self._is_unknown(token_id):
                self._window.pop()
                return None
            if len(self._window) - self._num_settled <= self._most_pending:
                return None
            new_text = self._settle_most(decoded)
        else:
            new_text = decoded[len(self._settled) :]
            if len(self._window) < _LONGEST_WINDOW:
                self._settled = decoded
            else:  # the text settled now begins with a character, and is enough context for the tokens to come
                del self._window[: self._num_settled]
                self._settled = self._decode(self._window)
            self._num_settled = len(self._window)
        if self._stop_strings and new_text:
            return self._extend(new_text)
        self.text += new_text
        return None

    def add_unread(self, token_ids: Sequence[int]) -> None:
        """Add tokens whose text is made by `finish`, at once, for callers that do not read it before.

        Stop strings are not searched for.
        """
        self._window += token_ids

    def finish(self) -> None:
        """Settle the text of the last tokens; an incomplete character becomes U+FFFD."""
        if len(self._window) > self._num_settled:
            self.text += self._decode(self._window)[len(self._settled) :]

    def settled_text(self) -> str:
        """Return `text` without an end that a stop string may still cut off."""
        if self._include_stop_string or not self._stop_strings:
            return self.text
        held_back = max(len(stop) for stop in self._stop_strings) - 1
        return self.text[: max(0, len(self.text) - held_back)]

    def _settle_most(self, decoded: str) -> str:
        """Settle all pending tokens but those that may still form a character with the next one; return their text.

        `decoded` is the text of the whole window. Tokens that are not context for the rest are removed from the window.
        Every step is checked against `decoded`. If the decoder allows no such cut, nothing is settled, and the
        next attempt is made when twice as many tokens are pending.
        """
        last = len(self._window) - _LONGEST_CHARACTER
        for end in range(last, max(self._num_settled, last - _LONGEST_CHARACTER), -1):
            settled = self._decode(self._window[:end])
            if decoded.startswith(settled) and settled.startswith(self._settled):
                break
        else:
            self._most_pending *= 2
            return ""
        new_text = settled[len(self._settled) :]
        rest, rest_text = self._window[end:], decoded[len(settled) :]
        for context in (
            self._window[end - _LONGEST_CHARACTER : end],
            self._window[: self._num_settled],
            self._window[: self._num_settled + _LONGEST_CHARACTER],
        ):
            context_text = self._decode(context)
            if context_text and self._decode(context + rest) == context_text + rest_text:
                self._window, self._settled = context + rest, context_text
                break
        else:
            self._settled = settled
            context = self._window[:end]
        self._num_settled = len(context)
        self._most_pending = _MOST_PENDING if len(context) <= 2 * _MOST_PENDING else 2 * len(context)
        return new_text

    def _extend(self, new_text: str) -> str | None:
        num_searched = len(self.text)
        self.text += new_text
        if self._num_unsearched >= 0:
            return None
        match = find_stop_string(self.text, num_searched, self._stop_strings)
        if match is None:
            return None
        self.text = self.text[: match.end if self._include_stop_string else match.start]
        return match.stop_string


_SPECIAL_TOKEN_IDS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, frozenset[int]]] = WeakKeyDictionary()


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that decoding with `skip_special_tokens` leaves out, cached by tokenizer and its length."""
    known = _SPECIAL_TOKEN_IDS.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        found = tokenizer.all_special_ids
        if backend is not None:
            found = [token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special]
        known = _SPECIAL_TOKEN_IDS[tokenizer] = len(tokenizer), frozenset(found)
    return known[1]


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Return a function from a token, special ones included, to its text alone; each token is decoded once."""
    decode = _decoder(tokenizer, skip_special_tokens=False)

    @functools.cache
    def decode_token(token_id: int) -> str:
        return decode([token_id])

    return decode_token


def _unknown(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bool]:
    """Return a function that is True for tokens that the tokenizer does not have, and decoding skips.

    Such tokens pad a model's vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return lambda token_id: backend is not None and backend.id_to_token(token_id) is None


def _decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return `tokenizer.decode`, taken from the tokenizers library where transformers adds nothing: 4 times as fast."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    ):
        decode_tokens = tokenizer.backend_tokenizer.decode
        return lambda token_ids: decode_tokens(token_ids, skip_special_tokens)

    def decode(token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text

    return decode
