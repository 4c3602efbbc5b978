"""What a caller may ask of sampling; names and meanings are vLLM's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import RequestError, did_you_mean

NOT_YET_AVAILABLE = frozenset(
    {
        "best_of",
        "guided_decoding",
        "logits_processors",
        "structured_outputs",
        "truncate_prompt_tokens",
    }
)
"""vLLM's fields that this version refuses by name."""

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing logits by it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Raises `RequestError` on a value out of range, naming the field, the value and the range.
    """

    n: int = 1
    """Completions a prompt; more than 1 needs a temperature above 0."""
    temperature: float = 1.0
    """0: greedy. Logits are divided by it before top_k and top_p."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability; 1: all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0: all. Before top_k and top_p."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token in the output so far, from -2 to 2; 0: off."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the output so far, from -2 to 2; 0: off."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the output less likely if above 1, likelier if below: their logits are
    divided by it if positive, else multiplied; 1: off."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these tokens, before the penalties."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw from these tokens only; None: from all."""
    bad_words: Sequence[str] | None = None
    """Texts not to write: a token that would complete one, as tokenized at a text's start or after a space,
    is not drawn."""
    seed: int | None = None
    """Same seed, same noise for each position, in any batch. None: drawn from the `LLM`'s seed."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: until the model's length."""
    min_tokens: int = 0
    """Tokens to generate before an EOS token or one of `stop_token_ids` may be drawn."""
    logprobs: int | None = None
    """Log probabilities to return for each token of the output: this many likeliest, and the drawn one's.
    Before any option changes them; -1: of the whole vocabulary; None: none."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text, besides the model's EOS tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after an EOS token."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    """False: token ids only, `text` stays empty."""

    def __post_init__(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}; it must be True or False.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check("n", self.n, int, lambda n: n >= 1, "1 or more")
        _check("temperature", self.temperature, float, lambda t: 0 <= t < math.inf, "a number, 0 (greedy) or more")
        _check("top_p", self.top_p, float, lambda p: 0 < p <= 1, "above 0, at most 1 (off)")
        _check("top_k", self.top_k, int, lambda k: k >= -1, "1 or more, or 0 or -1 (off)")
        _check("min_p", self.min_p, float, lambda p: 0 <= p <= 1, "from 0 (off) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), float, lambda penalty: -2 <= penalty <= 2, "from -2 to 2; 0 is off")
        _check("repetition_penalty", self.repetition_penalty, float, lambda r: 0 < r < math.inf, "above 0; 1 is off")
        if self.seed is not None:
            _check("seed", self.seed, int, lambda seed: 0 <= seed < 2**63, "from 0 to 2**63 - 1, or None")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, int, lambda n: n >= 1, "1 or more, or None (the model's length)")
        _check("min_tokens", self.min_tokens, int, lambda n: n >= 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens}; it must be at most max_tokens={self.max_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), int, lambda k: k >= -1, "0 or more, -1 (all tokens) or None (none)")
        self._check_token_options()
        for text in stop:
            _check("stop", text, str, bool, "a string, or several, none of them empty")
        for token in self.stop_token_ids or ():
            _check("stop_token_ids", token, int, lambda token: token >= 0, "token ids, 0 or more")
        if stop and not self.detokenize:
            raise RequestError(
                "stop strings are found in the text, and detokenize=False makes none; use stop_token_ids."
            )

        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n={self.n}; it must be 1 when temperature is 0: completions would be equal. Raise the temperature."
            )

    def _check_token_options(self) -> None:
        """`allowed_token_ids`, `bad_words` and `logit_bias`, copied so that the caller's may change."""
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids=(); it must hold a token id or more, or be None (all tokens).")
            for token in self.allowed_token_ids:
                _check("allowed_token_ids", token, int, lambda token: token >= 0, "token ids, 0 or more")
        words = self.bad_words
        if isinstance(words, str):
            raise RequestError(f"bad_words={words!r}; it must be a list of strings: [{words!r}].")
        object.__setattr__(self, "bad_words", tuple(words or ()))
        for word in self.bad_words or ():
            _check("bad_words", word, str, bool, "strings, none of them empty")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias={self.logit_bias!r}; it must be token ids with a number each.")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _check("logit_bias", token, int, lambda token: token >= 0, "token ids, 0 or more, with a number each")
                _check(f"logit_bias[{token}]", bias, float, math.isfinite, "a finite number")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens that a model of `vocab_size` does not have; those of `stop_token_ids` do no harm."""
        for name in ("allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                _check(name, token, int, lambda token: token < vocab_size, f"token ids below {vocab_size}, the model's")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @classmethod
    def from_options(cls, **options: Any) -> SamplingParams:
        """`SamplingParams(**options)`, with an unknown name refused as a `RequestError` that lists the known."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in NOT_YET_AVAILABLE:
                raise RequestError(f"sampling parameter {name!r} is not yet available.")
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}.{did_you_mean(name, known)}")
        return cls(**options)


def _check(field: str, value: Any, kind: type, is_in_range: Callable[[Any], bool], wanted: str) -> None:
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or isinstance(value, bool) or not is_in_range(value):
        raise RequestError(f"{field}={value!r}; it must be {wanted}.")
