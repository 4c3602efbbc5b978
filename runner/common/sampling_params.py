"""`SamplingParams`, the sampling options of a request; names and meanings are vLLM's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from piecegraph.errors import RequestError, did_you_mean
from piecegraph.runner.common.token_ids import as_token_id, as_token_ids, plain_number
from piecegraph.runner.structured_output.params import StructuredOutputsParams, as_structured_outputs

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "guided_decoding": (None,),
    "logits_processors": (None,),
    "logprob_token_ids": (None,),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (None,),
    "prompt_logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (None, 1),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
    "watermarking": (None, False),
}
"""Fields of vLLM's that this version lacks, each with the values that ask for what happens anyway."""

GREEDY_BELOW = 1e-5
"""Temperatures below this value mean greedy sampling, because dividing logits by them would overflow."""


class RequestOutputKind(Enum):
    """The contents of a request's outputs. `LLM.generate` returns final outputs for every kind."""

    CUMULATIVE = 0
    """Each output holds everything generated so far."""
    DELTA = 1
    """Each output holds what is new since the preceding output; completions without new tokens are left out."""
    FINAL_ONLY = 2
    """There is one output, when the request has finished."""


class _Freezable:
    """A base class whose `_is_frozen` slot, once set, forbids assigning attributes."""

    __slots__ = ("_is_frozen",)


MAX_COMPLETIONS = 16_384
"""The largest number of completions of one prompt (`n`)."""


@dataclass(slots=True, kw_only=True, eq=False)
class SamplingParams(_Freezable):
    """The options that determine how the tokens of one request are sampled and when the request ends.

    Fields can be assigned, and each is checked on assignment. Conditions on several fields (`min_tokens` and
    `max_tokens`, `n` and `temperature`, `stop` and `detokenize`) are checked on construction and when a request
    takes the parameters, because they may be violated between two assignments. A request keeps a copy (`snapshot`),
    so an assignment affects no request that was already added.

    Raises `RequestError` for a value out of range, naming the field, the value and the range. Fields of vLLM's that
    are missing here are refused by name unless their value asks for what happens anyway.
    """

    n: int = 1
    """The number of completions per prompt; more than 1 needs a temperature above 0."""
    temperature: float = 1.0
    """The number that logits are divided by, before top_k and top_p; 0: greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability; 1: all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest token; 0: all. Applied before top_k and top_p."""
    presence_penalty: float = 0.0
    """A number subtracted from the logit of every token that occurs in the output so far, from -2 to 2; 0: off."""
    frequency_penalty: float = 0.0
    """A number subtracted from a token's logit for each occurrence in the output so far, from -2 to 2; 0: off."""
    repetition_penalty: float = 1.0
    """A factor that makes tokens of the prompt and the output less likely if above 1, more likely if below: positive
    logits are divided by it, negative ones multiplied; 1: off."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers added to the logits of these tokens, before the penalties."""
    allowed_token_ids: Iterable[int] | None = None
    """Sample these tokens only; None: all."""
    bad_words: Iterable[str] | None = None
    """Texts that must not be generated: a token that would complete one of them, as tokenized at the start of a text
    or after a space, is not sampled."""
    seed: int | None = None
    """The seed of the noise, which is the same for each position in any batch. None: drawn from the `LLM`'s seed."""
    max_tokens: int | None = 16
    """The largest number of tokens to generate; None: up to the model's length."""
    min_tokens: int = 0
    """The number of tokens to generate before an EOS token or one of `stop_token_ids` may be sampled."""
    logprobs: int | None = None
    """The number of likeliest tokens whose log probabilities are returned for each output token, besides the sampled
    token's; -1: the whole vocabulary; True: 1; None: none. The `LLM`'s `logprobs_mode` selects the logits."""
    prompt_logprobs: int | None = None
    """The number of log probabilities to return for each token of the prompt, as for `logprobs`."""
    flat_logprobs: bool = False
    """Whether log probabilities are returned as `FlatLogprobs`: a few lists instead of an object per token."""
    stop: str | Iterable[str] | None = None
    """Strings that end the text, and are not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: Iterable[int] | None = None
    """Tokens that end the text, besides the model's EOS tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Whether to continue after an EOS token."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    """Whether outputs have text; if False they have token ids only, and `text` stays empty."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as leave room for one output token."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The contents of the outputs that `Engine.step` and `LLM.stream` return."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """The form that the output has: JSON of a schema, a regular expression, a choice, a grammar; None: any."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments for custom logits processors (`LLM`'s `logits_processors`), which nothing else reads."""

    def __post_init__(self) -> None:
        self._check_together()

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_frozen", False):
            raise dataclasses.FrozenInstanceError(f"{name} of the parameters of a running request cannot be assigned")
        check = _CHECKS.get(name)
        object.__setattr__(self, name, value if check is None else check(name, value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __copy__(self) -> Self:
        return type(self)(**self._values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The checks copy every list and mapping except `extra_args`, whose values only the caller knows.
        return type(self)(**{**self._values(), "extra_args": copy.deepcopy(self.extra_args, memo)})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._values())

    def clone(self) -> Self:
        """Return a deep copy, whose fields can be assigned."""
        return copy.deepcopy(self)

    def snapshot(self) -> Self:
        """Return a checked, frozen copy of these parameters, or the object itself if it is frozen already.

        Raises `RequestError` if fields contradict each other or hold values that cannot be copied.
        """
        if getattr(self, "_is_frozen", False):
            return self
        extra_args = None
        if self.extra_args is not None:
            try:
                extra_args = copy.deepcopy(self.extra_args)
            except MemoryError:
                raise
            except Exception as error:  # whatever copying a caller's object raises
                raise RequestError(f"extra_args={self.extra_args!r} cannot be copied: {error}") from error
        frozen = type(self)(**{**self._values(), "extra_args": extra_args})
        object.__setattr__(frozen, "_is_frozen", True)
        return frozen

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens}; it must be at most max_tokens={self.max_tokens}.")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are searched in the text, and detokenize=False makes no text; use stop_token_ids."
            )
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n={self.n}; it must be 1 when temperature is 0: completions would be equal. Raise the temperature."
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids of `vocab_size` or more, except harmless ones in `stop_token_ids`."""
        for name in ("allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                _check(name, token, int, lambda token: token < vocab_size, f"token ids below {vocab_size}, the model's")

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is taken instead of a sample."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; empty if there are none."""
        return tuple(self.stop or ())

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Return `SamplingParams(**options)`."""
        return cls(**options)

    @classmethod
    def from_optional(cls, **options: Any) -> Self:
        """Return `SamplingParams(**options)` for options as a server receives them.

        None selects a field's default unless the field itself may be None, tokens of `logit_bias` may be strings, and
        its values are clamped to -100 to 100.
        """
        bias = options.get("logit_bias")
        if isinstance(bias, Mapping):
            options["logit_bias"] = {_as_int(token): _within_100(value) for token, value in bias.items()}
        return cls(**{name: value for name, value in options.items() if value is not None or name == "max_tokens"})


FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
"""The names of all fields, in order."""


def _rebuild(kind: type[SamplingParams], values: Mapping[str, Any]) -> SamplingParams:
    return kind(**values)


def _with_vllm_fields(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` extended to ignore vLLM's other fields if their values have no effect and refuse unknown names."""

    @functools.wraps(init)
    def checked_init(self: SamplingParams, *arguments: Any, **options: Any) -> None:
        if not options.keys() <= _FIELD_SET:
            options = {name: value for name, value in options.items() if not _is_without_effect(name, value)}
        init(self, *arguments, **options)

    return checked_init


_FIELD_SET = frozenset(FIELDS)
SamplingParams.__init__ = _with_vllm_fields(SamplingParams.__init__)  # type: ignore[method-assign]


def _is_without_effect(name: str, value: Any) -> bool:
    """Return whether an option is a field of vLLM's that may be ignored.

    Raises `RequestError` for a field of vLLM's that may not be ignored, and for an unknown name.
    """
    if name in _FIELD_SET:
        return False
    if name not in WITHOUT_EFFECT:
        raise RequestError(f"unknown sampling parameter {name!r}.{did_you_mean(name, FIELDS)}")
    if any(value is one or (type(value) is type(one) and value == one) for one in WITHOUT_EFFECT[name]):
        return True
    raise RequestError(f"sampling parameter {name!r} is not yet available.")


def _check(field: str, value: Any, kind: type, is_in_range: Callable[[Any], bool], wanted: str) -> None:
    kinds = (int, float) if kind is float else kind
    try:
        is_right = isinstance(value, kinds) and not isinstance(value, bool) and is_in_range(value)
    except OverflowError:  # an int too large for a float
        is_right = False
    if not is_right:
        raise RequestError(f"{field}={value!r}; it must be {wanted}.")


def _number(kind: type, is_in_range: Callable[[Any], bool], wanted: str, *, is_optional: bool = False) -> _Check:
    def check(name: str, value: Any) -> Any:
        value = plain_number(value)
        if not (value is None and is_optional):
            _check(name, value, kind, is_in_range, wanted)
        return value

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={value!r}; it must be True or False.")
    return value


def _num_logprobs(name: str, value: Any) -> int | None:
    if value is True:  # as vLLM takes it
        return 1
    value = plain_number(value)
    if value is not None:
        _check(name, value, int, lambda k: k >= -1, "0 or more, -1 (all tokens) or None (none)")
    return value  # type: ignore[no-any-return]  # an int, by now


def _stop(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else _as_list(name, value, "a string, or several, none of them empty")
    for text in texts:
        _check(name, text, str, bool, "a string, or several, none of them empty")
    return texts


def _stop_token_ids(name: str, value: Any) -> list[int]:
    return [] if value is None else _token_ids(name, value)


def _allowed_token_ids(name: str, value: Any) -> list[int] | None:
    if value is None:
        return None
    tokens = _token_ids(name, value)
    if not tokens:
        raise RequestError("allowed_token_ids=[]; it must hold a token id or more, or be None (all tokens).")
    return tokens


def _token_ids(name: str, value: Any) -> list[int]:
    tokens = as_token_ids(name, value)
    for token in tokens:
        _check(name, token, int, lambda token: token >= 0, "token ids, 0 or more")
    return tokens


def _bad_words(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        raise RequestError(f"bad_words={value!r}; it must be a list of strings: [{value!r}].")
    words = _as_list(name, value, "strings, none of them empty")
    for word in words:
        _check(name, word, str, bool, "strings, none of them empty")
    return words


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias={value!r}; it must be token ids with a number each.")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str | bytes | bool | float):
            raise RequestError(f"logit_bias={token!r}; it must be token ids, 0 or more, with a number each.")
        token, bias = as_token_id(name, token), plain_number(bias)
        _check(name, token, int, lambda token: token >= 0, "token ids, 0 or more, with a number each")
        _check(f"logit_bias[{token}]", bias, float, math.isfinite, "a finite number")
        biases[token] = bias
    return biases


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if isinstance(value, Enum) and value.name in RequestOutputKind.__members__:  # vLLM's own may be given
        return RequestOutputKind[value.name]
    names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
    raise RequestError(f"output_kind={value!r}; it must be one of {names}.")


def _extra_args(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"extra_args={value!r}; it must be a mapping with strings as keys.")
    return dict(value)


def _as_list(name: str, value: Any, wanted: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name}={value!r}; it must be {wanted}.")
    return list(value)


def _as_int(token: Any) -> Any:
    """Return a token of a server's `logit_bias` as an int; anything but a number is returned unchanged and refused
    later."""
    try:
        return int(token) if isinstance(token, str) else token
    except ValueError:
        return token


def _within_100(bias: Any) -> Any:
    return min(100.0, max(-100.0, bias)) if isinstance(bias, int | float) else bias


_Check = Callable[[str, Any], Any]

_CHECKS: Mapping[str, _Check] = {
    "n": _number(int, lambda n: 1 <= n <= MAX_COMPLETIONS, f"from 1 to {MAX_COMPLETIONS}"),
    "temperature": _number(float, lambda t: 0 <= t < math.inf, "a number, 0 (greedy) or more"),
    "top_p": _number(float, lambda p: 0 < p <= 1, "above 0, at most 1 (off)"),
    "top_k": _number(int, lambda k: k >= -1, "1 or more, or 0 or -1 (off)"),
    "min_p": _number(float, lambda p: 0 <= p <= 1, "from 0 (off) to 1"),
    "presence_penalty": _number(float, lambda p: -2 <= p <= 2, "from -2 to 2; 0 is off"),
    "frequency_penalty": _number(float, lambda p: -2 <= p <= 2, "from -2 to 2; 0 is off"),
    "repetition_penalty": _number(float, lambda r: 0 < r < math.inf, "above 0; 1 is off"),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "seed": _number(int, lambda seed: 0 <= seed < 2**63, "from 0 to 2**63 - 1, or None", is_optional=True),
    "max_tokens": _number(int, lambda n: n >= 1, "1 or more, or None (the model's length)", is_optional=True),
    "min_tokens": _number(int, lambda n: n >= 0, "0 or more"),
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "flat_logprobs": _boolean,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "detokenize": _boolean,
    "truncate_prompt_tokens": _number(
        int, lambda n: n == -1 or n >= 1, "1 or more, -1 (what fits) or None (all of it)", is_optional=True
    ),
    "output_kind": _output_kind,
    "structured_outputs": lambda name, value: None if value is None else as_structured_outputs(value),
    "extra_args": _extra_args,
}
"""The check of each field, which returns the value to keep or raises `RequestError`."""
