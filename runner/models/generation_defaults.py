"""A model's generation config: the tokens that end a text, and the default sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ConfigError, RequestError, did_you_mean
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_SAMPLING_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation config that set defaults of `SamplingParams`, with their names there [vLLM's choice]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The source of default sampling parameters. Raises `ConfigError` for an unknown kind or field."""

    kind: str = "auto"
    """`"auto"`: the model's generation_config.json; `"vllm"`: no file, so the defaults are those of `SamplingParams`.
    EOS tokens are the model's in both cases."""
    override: Mapping[str, Any] | None = None
    """Fields of a generation config that replace the file's."""

    def __post_init__(self) -> None:
        kind = "auto" if self.kind is None else self.kind
        object.__setattr__(self, "kind", kind)
        if kind not in ("auto", "vllm"):
            raise ConfigError(f"generation_config={kind!r} is unknown; it is 'auto' (the model's) or 'vllm' (none).")
        if self.override is not None and not isinstance(self.override, Mapping):
            raise ConfigError(f"override_generation_config={self.override!r}; it must be a dictionary.")
        for name in self.override or {}:
            if name not in _SAMPLING_FIELDS:
                known = did_you_mean(str(name), _SAMPLING_FIELDS)
                raise ConfigError(f"override_generation_config has {name!r}, which has no effect.{known}")

    def over(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults in effect: `defaults` of the model's generation config, if used, with the overrides."""
        override = {_SAMPLING_FIELDS[name]: value for name, value in (self.override or {}).items()}
        return {**(defaults if self.kind == "auto" else {}), **override}


def generation_config_of(source: ModelSource, model: PreTrainedModel) -> GenerationConfig | None:
    """Return the model's generation config.

    For random weights transformers does not read the file of the model's folder, so it is read here; without the file,
    the config is the one that transformers derives from the model's config.
    """
    if source.load_format != "dummy":
        return model.generation_config
    from transformers import GenerationConfig

    with quiet_transformers():
        try:
            return GenerationConfig.from_pretrained(source.location, **source.options)
        except OSError:
            return model.generation_config


def eos_token_ids(
    generation_config: GenerationConfig | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Return the tokens that end a text.

    These are the EOS tokens of the generation config, or else of the model's config, and the tokenizer's EOS token if
    it is another one [vLLM's rule].
    """
    eos = generation_config.eos_token_id if generation_config is not None else None
    if eos is None:
        eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    found = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))


def sampling_defaults(generation_config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the generation config sets, unchecked."""
    if generation_config is None:
        return {}
    given = generation_config.to_diff_dict()
    return {ours: given[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if given.get(theirs) is not None}


def default_sampling_params(defaults: Mapping[str, Any]) -> SamplingParams:
    """Return new `SamplingParams` with `defaults`. Raises `RequestError`, which names the file, for a bad value."""
    try:
        return SamplingParams(**defaults)
    except RequestError as error:
        raise RequestError(f"generation_config.json: {error} Correct it, or pass sampling_params.") from error
