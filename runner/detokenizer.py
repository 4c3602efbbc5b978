"""Text from tokens as they come, exact for characters that span tokens, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_TAIL = 6
"""Prompt tokens decoded along with the first output tokens: some decoders drop a space at the start."""

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes one request's output. `text` grows by whole characters only.

    Each new token is decoded together with the few before it, and the difference is kept once it does
    not end inside a character [the scheme of text-generation-inference and vLLM].
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
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._num_unsearched = min_tokens  # tokens still to come
        self._search_from = 0  # in `text`
        self._tokens = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._context_start = 0  # decoding begins here
        self._decoded_end = len(self._tokens)  # tokens before are in `text` (or the prompt)

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string it completed, which also cuts `text`, or None."""
        self._tokens.append(token_id)
        self._num_unsearched -= 1
        before = self._decode(self._context_start, self._decoded_end)
        after = self._decode(self._context_start, len(self._tokens))
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return None
        self._context_start, self._decoded_end = self._decoded_end, len(self._tokens)
        return self._extend(after[len(before) :])

    def add_unread(self, token_ids: Sequence[int]) -> None:
        """Add tokens whose text is made by `finish`, all at once: for callers that do not read it before.
        No stop strings are looked for."""
        self._tokens += token_ids

    def finish(self) -> None:
        """No more tokens: what is left of an incomplete character becomes U+FFFD."""
        before = self._decode(self._context_start, self._decoded_end)
        self.text += self._decode(self._context_start, len(self._tokens))[len(before) :]
        self._decoded_end = len(self._tokens)

    def settled_text(self) -> str:
        """`text` without an end that a stop string may still cut off."""
        if self._include_stop_string or not self._stop_strings:
            return self.text
        held_back = max(len(stop) for stop in self._stop_strings) - 1
        return self.text[: max(0, len(self.text) - held_back)]

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(
            self._tokens[start:end],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str), type(text)
        return text

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
