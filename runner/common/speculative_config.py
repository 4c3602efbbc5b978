"""`SpeculativeConfig`, the checked form of `LLM`'s argument `speculative_config`, under vLLM's names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean

HEADS = ("eagle3", "mtp")
"""The methods by which a head drafts that reads the model's hidden states."""

METHODS = ("ngram", "draft_model", *HEADS)
"""The methods that draft here."""

_WITH_MODEL = ("draft_model", "eagle3")
"""The methods that need a second folder of weights."""

_WITHOUT = "leave speculative_config out, the tokens are the same without it, or use method 'ngram'"

UNAVAILABLE_METHODS: Mapping[str, str] = {
    "eagle": f"EAGLE heads of the first two versions are not available: {_WITHOUT}, or an EAGLE-3 head",
    "suffix": f"suffix decoding is not available: {_WITHOUT}",
    "medusa": f"Medusa heads are not available: {_WITHOUT}",
    "mlp_speculator": f"MLP speculators are not available: {_WITHOUT}",
    "dflash": f"DFlash drafts are not available: {_WITHOUT}",
    "ngram_gpu": "use method 'ngram', which runs on the model's device",
    "extract_hidden_states": f"hidden states are not extracted: {_WITHOUT}",
    "custom_class": f"proposers of the caller's are not available: {_WITHOUT}",
}
"""Methods of vLLM's that do not draft here, with what to do instead."""

UNAVAILABLE_KEYS = (
    *("attention_backend", "code_revision", "disable_by_batch_size", "disable_padded_drafter_batch"),
    *("draft_load_config", "draft_tensor_parallel_size", "enforce_eager", "max_model_len", "moe_backend"),
    *("parallel_drafting", "quantization", "revision", "speculative_token_tree", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob"),
    *("tensor_parallel_size", "tokenizer"),
    *("use_heterogeneous_vocab", "use_local_argmax_reduction"),
)
"""Keys of vLLM's that no method here reads."""

MAX_SPECULATIVE_TOKENS = 64
"""The most tokens that a step may draft for a request; far more than pay."""

DEFAULT_PROMPT_LOOKUP = 5
"""The length of the n-grams that are looked up unless the caller says otherwise, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted and verified. Raises `ConfigError` for a value that is out of range."""

    method: str
    """How tokens are drafted; one of `METHODS`."""
    num_speculative_tokens: int
    """The most tokens that a step drafts for a request. A request may ask for fewer."""
    model: str | None = None
    """draft_model: the folder, .gguf file or hub id of the model that drafts, which must have the same tokenizer.
    eagle3: the folder or hub id of the head, in the format of the speculators library. mtp: None, since the layers lie
    among the model's own weights."""
    prompt_lookup_max: int = None  # type: ignore[assignment]  # an int from `__post_init__` on
    """ngram: the longest sequence of last tokens that is looked up; None: `prompt_lookup_min`, else 5."""
    prompt_lookup_min: int = None  # type: ignore[assignment]  # an int from `__post_init__` on
    """ngram: the shortest one; None: `prompt_lookup_max`."""
    rejection_sample_method: str = "standard"
    """How drafts are verified: "standard" accepts each with the probability that keeps the target's distribution.
    "block" (Sun et al., 2024) accepts as many in distribution for drafts that are chosen as here, so it is the same.
    "synthetic" accepts by `synthetic_acceptance_rates`, for measurements with random weights: answers mean nothing."""
    draft_sample_method: str = "greedy"
    """draft_model, eagle3, mtp: how drafts are chosen. "greedy" takes the likeliest; "probabilistic" draws them at the
    request's temperature, with the noise that the model's own token is drawn with."""

    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """synthetic: for each draft of a step, the probability that it and all drafts before it are accepted."""
    synthetic_acceptance_length: float | None = None
    """synthetic: instead of rates, the mean number of tokens that a verification gives."""
    stops_when_slower: bool = True
    """Whether batches are no longer drafted for where measured steps say that this is slower."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            instead = UNAVAILABLE_METHODS.get(str(self.method))
            if instead is not None:
                raise ConfigError(f"speculative_config: method={self.method!r}: {instead}.")
            raise ConfigError(
                f"speculative_config: method={self.method!r} is unknown.{did_you_mean(str(self.method), METHODS)}"
            )
        if not isinstance(self.stops_when_slower, bool):
            raise ConfigError(
                f"speculative_config: stops_when_slower={self.stops_when_slower!r}; it must be True or False."
            )
        _check_count("num_speculative_tokens", self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if longest is None:
            longest = DEFAULT_PROMPT_LOOKUP if shortest is None else shortest
        if shortest is None:
            shortest = longest
        for name, value in (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest)):
            _check_count(name, value, MAX_SPECULATIVE_TOKENS)
            object.__setattr__(self, name, value)
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}; give a "
                "shortest length that is at most the longest."
            )
        _check_choice(
            "rejection_sample_method",
            self.rejection_sample_method,
            available=("standard", "block", "synthetic"),
            unavailable=(),
        )
        self._check_synthetic()
        chosen = ("greedy",) if self.method == "ngram" else ("greedy", "probabilistic")
        if self.draft_sample_method == "probabilistic" and "probabilistic" not in chosen:
            raise ConfigError(
                f"speculative_config: draft_sample_method='probabilistic', but method {self.method!r} draws nothing; "
                "leave it out, or use a method with a model or a head that drafts."
            )
        _check_choice("draft_sample_method", self.draft_sample_method, available=chosen, unavailable=())
        if self.method in _WITH_MODEL and (not isinstance(self.model, str) or not self.model):
            wanted = (
                "the model that drafts, a folder, a .gguf file" if self.method == "draft_model" else "a head's folder"
            )
            raise ConfigError(
                f"speculative_config: model={self.model!r}; method {self.method!r} needs {wanted} or a hub id."
            )

    def _check_synthetic(self) -> None:
        """Raise `ConfigError` unless the rates or the length are given where they belong, and possible."""
        count, rates, length = (
            self.num_speculative_tokens,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
        )
        is_given = (rates is not None) + (length is not None)
        if self.rejection_sample_method != "synthetic":
            if is_given:
                raise ConfigError(
                    "speculative_config: synthetic_acceptance_rates and synthetic_acceptance_length belong to "
                    "rejection_sample_method 'synthetic'; leave them out."
                )
            return
        if is_given != 1:
            raise ConfigError(
                "speculative_config: rejection_sample_method='synthetic' needs synthetic_acceptance_rates or "
                "synthetic_acceptance_length; give one of the two."
            )
        if length is not None and (not _is_number(length) or not 1 <= length <= count + 1):
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_length={length!r}; it must be a number from 1 to "
                f"{count + 1}, one more than num_speculative_tokens."
            )
        if rates is None:
            return
        is_list = isinstance(rates, list | tuple) and len(rates) == count and all(map(_is_number, rates))
        if not is_list or any(not 0 <= one <= 1 for one in rates) or sorted(rates, reverse=True) != list(rates):
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_rates={rates!r}; there must be {count} numbers from 0 to 1, "
                "none above the one before."
            )
        object.__setattr__(self, "synthetic_acceptance_rates", tuple(rates))

    @property
    def is_synthetic(self) -> bool:
        """Return whether drafts are accepted by given rates, so that answers mean nothing."""
        return self.rejection_sample_method == "synthetic"

    def __str__(self) -> str:
        of = self.model or "the model's own layer"
        if self.method == "ngram":
            of = f"of {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        stops = ", while measured steps say that it pays" if self.stops_when_slower else ""
        stops += ", accepted by given rates: the answers mean nothing" if self.is_synthetic else ""
        return f"{self.method} ({of}), up to {self.num_speculative_tokens} tokens a request and step{stops}"

    @classmethod
    def parse(cls, value: object) -> SpeculativeConfig | None:
        """Return the config for `LLM`'s argument, a mapping; None stands for no speculative decoding.

        A key with the value None counts as absent. Without a method, that of the folder `model` is taken: eagle3 for an
        EAGLE-3 head, else draft_model. The number of tokens that such a head was made for is its default. Raises
        `ConfigError` for unknown keys and for values out of range.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config={value!r}; it must be a mapping, such as "
                "{'method': 'ngram', 'num_speculative_tokens': 4}, or None."
            )
        given = {key: one for key, one in value.items() if one is not None}
        known = [field.name for field in fields(cls)]
        if given.get("model") in ("ngram", "[ngram]"):  # vLLM's older spelling
            del given["model"]
            given.setdefault("method", "ngram")
        if "method" not in given:
            given["method"] = _method_of(given.get("model"))
        if given["method"] is None:
            raise ConfigError(f"speculative_config names no method; give one of {', '.join(map(repr, METHODS))}.")
        if given["method"] in ("ngram", "mtp") and "model" in given:
            raise ConfigError(
                f"speculative_config: model={given['model']!r}, but method {given['method']!r} has no draft model; "
                "leave one of the two out."
            )
        if given["method"] not in _WITH_MODEL:
            given.pop("model", None)
        elif isinstance(given.get("model"), str | os.PathLike):
            given["model"] = os.path.expanduser(os.fspath(given["model"]))
        if given["method"] != "ngram":
            for key in ("prompt_lookup_min", "prompt_lookup_max"):
                if key in given:
                    raise ConfigError(f"speculative_config: {key!r} belongs to method 'ngram'; leave it out.")
        for key in given:
            if key in UNAVAILABLE_KEYS:
                raise ConfigError(f"speculative_config: {key!r} is not available here; leave it out.")
            if key not in known:
                raise ConfigError(f"speculative_config has no key {key!r}.{did_you_mean(str(key), known)}")
        if "num_speculative_tokens" not in given and given["method"] == "eagle3":
            given |= _proposal_of(given.get("model"))
        if "num_speculative_tokens" not in given and given["method"] in METHODS:
            raise ConfigError("speculative_config has no num_speculative_tokens; say how many tokens a step drafts.")
        given.setdefault("num_speculative_tokens", 1)  # of a method that is refused by name
        return cls(**given)


def head_kind(model: object) -> str | None:
    """Return the kind of head that lies in the folder `model`, as the speculators library names it.

    None: it is no such head, or no folder that can be read; whoever reads it says what is wrong.
    """
    kind = _written(model).get("speculators_model_type")
    return kind if isinstance(kind, str) else None


def _method_of(model: object) -> str | None:
    """Return the method for a folder, file or hub id that was given without one."""
    if model is None:
        return None
    return head_kind(model) or "draft_model"


def _proposal_of(model: object) -> dict[str, int]:
    """Return the number of tokens that the head in the folder `model` proposes, as its config says, or nothing."""
    config = _written(model).get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return {} if type(count) is not int else {"num_speculative_tokens": count}


def _written(model: object) -> Mapping[str, Any]:
    """Return the content of the config.json in the folder `model`; empty if there is none that can be read."""
    if not isinstance(model, str | os.PathLike):
        return {}
    try:
        found = json.loads(Path(model).expanduser().joinpath("config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, RuntimeError):  # the last: `~name` of no user
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_count(name: str, value: object, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise ConfigError(f"speculative_config: {name}={value!r}; it must be a whole number from 1 to {largest}.")


def _check_choice(name: str, value: object, *, available: tuple[str, ...], unavailable: tuple[str, ...]) -> None:
    if value in available:
        return
    if value in unavailable:
        raise ConfigError(f"speculative_config: {name}={value!r} is not yet available; use {available[0]!r}.")
    raise ConfigError(f"speculative_config: {name}={value!r} is unknown.{did_you_mean(str(value), available)}")
