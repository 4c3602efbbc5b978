"""Text from tokens as they come, exact for characters that span tokens, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_TAIL = 6
"""Prompt tokens decoded along with the first output tokens: some decoders drop a space at the start."""

_LONGEST_WINDOW = 4
"""Tokens decoded anew with each one that comes. Shortening the window costs a second decoding, so it is not done
at each token."""

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes one request's output. `text` grows by whole characters only, and is never taken back.

    Each new token is decoded together with a window of those before it, and the difference is kept once it
    does not end inside a character [the scheme of text-generation-inference and vLLM]. The text is what
    decoding all tokens at once gives, with one exception: decoders with byte fallback (SentencePiece's) make
    U+FFFD of a whole run of byte tokens if any of it is no character, and we may have told some of that run.
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
        """No stop string is looked for in what the first `min_tokens` tokens write."""
        self.text = ""
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._num_unsearched = min_tokens  # tokens still to come
        self._search_from = 0  # in `text`
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._window = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._num_settled = len(self._window)  # of the window's tokens; their text is in `text`, or the prompt's
        self._settled = self._decode(self._window)

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string it completed, which also cuts `text`, or None."""
        self._window.append(token_id)
        self._num_unsearched -= 1
        decoded = self._decode(self._window)
        if len(decoded) <= len(self._settled) or decoded.endswith(_INCOMPLETE):
            return None
        new_text = decoded[len(self._settled) :]
        if len(self._window) < _LONGEST_WINDOW:
            self._settled = decoded
        else:  # what settled now begins with a character, and is context enough for what comes
            del self._window[: self._num_settled]
            self._settled = self._decode(self._window)
        self._num_settled = len(self._window)
        if self._stop_strings:
            return self._extend(new_text)
        self.text += new_text
        return None

    def add_unread(self, token_ids: Sequence[int]) -> None:
        """Add tokens whose text is made by `finish`, all at once: for callers that do not read it before.
        No stop strings are looked for."""
        self._window += token_ids

    def finish(self) -> None:
        """No more tokens: what is left of an incomplete character becomes U+FFFD."""
        if len(self._window) > self._num_settled:
            self.text += self._decode(self._window)[len(self._settled) :]

    def settled_text(self) -> str:
        """`text` without an end that a stop string may still cut off."""
        if self._include_stop_string or not self._stop_strings:
            return self.text
        held_back = max(len(stop) for stop in self._stop_strings) - 1
        return self.text[: max(0, len(self.text) - held_back)]

    def _extend(self, new_text: str) -> str | None:
        searched = len(self.text)
        self.text += new_text
        if self._num_unsearched >= 0:
            self._search_from = len(self.text)
            return None
        found = [
            (at, stop)
            for stop in self._stop_strings
            if (at := self.text.find(stop, max(self._search_from, searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self._include_stop_string else at]
        return stop


def _decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, straight from the tokenizers library where transformers adds nothing to it: a fourth of
    the time."""
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
