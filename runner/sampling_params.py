"""What a caller may ask of sampling; names and meanings are vLLM's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.errors import RequestError, did_you_mean

NOT_YET_AVAILABLE = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "frequency_penalty",
        "guided_decoding",
        "logit_bias",
        "logits_processors",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
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
    """Completions a prompt; only 1 is available."""
    temperature: float = 1.0
    """0: greedy. Logits are divided by it before top_k and top_p."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability; 1: all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1: all."""
    seed: int | None = None
    """Same seed, same noise for each position, in any batch. None: drawn from the `LLM`'s seed."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: until the model's length."""
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
        _check("n", self.n, int, lambda n: n == 1, "1 (several completions a prompt are not yet available)")
        _check("temperature", self.temperature, float, lambda t: 0 <= t < math.inf, "a number, 0 (greedy) or more")
        _check("top_p", self.top_p, float, lambda p: 0 < p <= 1, "above 0, at most 1 (off)")
        _check("top_k", self.top_k, int, lambda k: k >= -1, "1 or more, or 0 or -1 (off)")
        if self.seed is not None:
            _check("seed", self.seed, int, lambda seed: 0 <= seed < 2**63, "from 0 to 2**63 - 1, or None")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, int, lambda n: n >= 1, "1 or more, or None (the model's length)")
        for text in stop:
            _check("stop", text, str, bool, "a string, or several, none of them empty")
        for token in self.stop_token_ids or ():
            _check("stop_token_ids", token, int, lambda token: token >= 0, "token ids, 0 or more")
        if stop and not self.detokenize:
            raise RequestError(
                "stop strings are found in the text, and detokenize=False makes none; use stop_token_ids."
            )

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
