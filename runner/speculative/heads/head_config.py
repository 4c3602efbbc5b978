"""The config of a head that drafts from the model's hidden states, read and checked before any weight is.

EAGLE-3 heads are read in the format of the `speculators` library: a `config.json` with `speculators_model_type`,
`transformer_layer_config`, `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`, under vLLM's meaning of these
(layer j's input; j of the model's layers, and by default 2, the middle and the last but two).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph.errors import CheckpointError, ConfigError, ModelError, ModelNotFound, UnsupportedModel, did_you_mean
from piecegraph.runner.attention.interface.transformers_attention import ATTENTION_IMPLEMENTATION
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import HEADS
from piecegraph.runner.models.checkpoint.files import check_weight_files
from piecegraph.runner.traceable.hidden_states import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYER_KINDS = ("llama", "qwen3")
"""The `model_type` of `transformer_layer_config` that an EAGLE-3 head may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The config of an EAGLE-3 head that fits the model."""

    source: ModelSource
    layer_config: PreTrainedConfig  # of the head's decoder layers
    hidden_states: tuple[int, ...]  # the places in the model, ascending
    target_hidden_size: int
    vocab_size: int  # of the model
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def __str__(self) -> str:
        layers = self.layer_config
        places = ", ".join(map(str, self.hidden_states))
        cached = 2 * layers.num_hidden_layers * layers.num_key_value_heads * layers.head_dim
        return (
            f"head: {self.source.model}, EAGLE-3 over hidden states of layers {places}, {self.draft_vocab_size} of "
            f"{self.vocab_size} tokens, {cached} numbers of key/value cache a token more"
        )

    @property
    def state_size(self) -> int:
        """The numbers of a hidden state that the head's layers read."""
        return int(self.layer_config.hidden_size)

    @property
    def hidden_size(self) -> int:
        """The numbers of a token that leave the model."""
        return len(self.hidden_states) * self.target_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """The layer for multi-token prediction among the weights of a model (`num_nextn_predict_layers`)."""

    source: ModelSource  # of the model
    state_size: int  # of a hidden state
    hidden_states: tuple[int, ...] = (LAST,)

    def __str__(self) -> str:
        return f"head: the multi-token prediction layer of {self.source.model}"

    @property
    def hidden_size(self) -> int:
        """The numbers of a token that leave the model."""
        return self.state_size


HeadConfig = Eagle3Config | MtpConfig


def mtp_config(source: ModelSource, hf_config: PreTrainedConfig, *, needs_weights: bool = True) -> MtpConfig:
    """Return the config of the layer for multi-token prediction of the model in `source`.

    Raises `ConfigError` for a model without one, and `UnsupportedModel` for one with several.
    """
    from safetensors import safe_open

    model = hf_config.get_text_config(decoder=True)
    count = getattr(model, "num_mtp_layers", None) or getattr(model, "num_nextn_predict_layers", None)
    if not count:
        raise ConfigError(
            f"the config of {source.model!r} has no num_nextn_predict_layers, so the model has no layer for multi-token"
            " prediction; draft with another method."
        )
    if count != 1:
        raise UnsupportedModel(
            f"{source.model!r} has {count} layers for multi-token prediction, and one is available; draft with another "
            "method."
        )
    if needs_weights and source.load_format != "dummy":
        wanted = f"layers.{model.num_hidden_layers}.eh_proj.weight"
        for file in source.weight_files if not source.is_gguf else ():
            with safe_open(str(file), framework="pt") as opened:
                names = list(opened.keys())
            if any(name.endswith(wanted) for name in names):
                break
        else:
            raise CheckpointError(
                f"{source.model!r} has no tensor {wanted} in its safetensors files: its layer for multi-token "
                "prediction was left out of this checkpoint. Take one with it, or draft with another method."
            )
    return MtpConfig(source=source, state_size=model.hidden_size)


def eagle3_config(source: ModelSource, hf_config: PreTrainedConfig, *, needs_weights: bool = True) -> Eagle3Config:
    """Return the config of the head in `source` for a model with `hf_config`.

    Raises `ModelNotFound` for a folder that is missing, `ModelError` for a config that cannot be read,
    `CheckpointError` for files of weights that are missing or truncated, and `ConfigError` or `UnsupportedModel` for a
    head that is not of this model or works in a way that is not available.
    """
    written = _read(source)
    _check_kind(written, source)
    model = hf_config.get_text_config(decoder=True)
    layer_config = _layer_config(written["transformer_layer_config"], source)
    if layer_config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{source.model!r} is for a vocabulary of {layer_config.vocab_size} tokens and the model has one of "
            f"{model.vocab_size}; choose the head that was made for this model."
        )
    target = written.get("target_hidden_size") or layer_config.hidden_size
    if target != model.hidden_size:
        raise ConfigError(
            f"{source.model!r} reads hidden states of {target} numbers and the model's have {model.hidden_size}; "
            "choose the head that was made for this model."
        )
    draft_vocab_size = written.get("draft_vocab_size") or model.vocab_size
    if type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= model.vocab_size:
        raise ConfigError(
            f"{source.model!r}: draft_vocab_size={draft_vocab_size!r}; it must be a whole number from 1 to the model's "
            f"{model.vocab_size}."
        )
    if needs_weights:
        check_weight_files(source)
        if source.load_format != "dummy" and not source.weight_files:
            raise CheckpointError(
                f"no weights to read at {source.model!r}: it has no model.safetensors. Download the head first."
            )
    return Eagle3Config(
        source=source,
        layer_config=layer_config,
        hidden_states=_places(written.get("eagle_aux_hidden_state_layer_ids"), model.num_hidden_layers, source),
        target_hidden_size=target,
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab_size,
        **{
            name: bool(written.get(name, False))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )


def with_head(
    config: EngineConfig, hf_config: PreTrainedConfig, *, needs_weights: bool = True
) -> tuple[EngineConfig, HeadConfig | None]:
    """Return `config` with the hidden states that leave the model for the head that it names, and the head's config.

    Without a head, `config` itself and None. Raises what `eagle3_config` raises, naming the head.
    """
    if config.speculative is None or config.is_draft or not is_head(config.speculative.method):
        return config, None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative_config: method {config.speculative.method!r} is not yet available with several ranks; leave "
            "tensor_parallel_size out, or draft with method 'ngram'."
        )
    with naming_the_head():
        read = mtp_config if config.speculative.method == "mtp" else eagle3_config
        head = read(head_source(config), hf_config, needs_weights=needs_weights)
    return replace(config, source=replace(config.source, hidden_states=head.hidden_states)), head


def head_source(config: EngineConfig) -> ModelSource:
    """Return the place of the head; its weights are random if the model's are."""
    assert config.speculative is not None
    model = config.speculative.model
    if model is None:
        return config.source
    load_format = "dummy" if config.source.load_format == "dummy" else "auto"
    return ModelSource(model=model, load_format=load_format)


@contextmanager
def naming_the_head() -> Iterator[None]:
    """Say of what is refused inside the block that the head is meant."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(f"speculative_config: the head: {error}") from error


def is_head(method: str | None) -> bool:
    """Return whether a method drafts by a head over the model's hidden states."""
    return method in HEADS


def _read(source: ModelSource) -> Mapping[str, Any]:
    """Return the content of the head's config.json."""
    from transformers import PreTrainedConfig

    folder = Path(source.model)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ModelNotFound(f"the folder {source.model!r} has no config.json, so it is not a head.")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise ModelError(f"{file} cannot be read as JSON: {error}. Copy or download it again.") from error
        if not isinstance(found, dict):
            raise ModelError(f"{file} holds a {type(found).__name__}; an object is needed.")
        return found
    if folder.is_absolute() or source.model.startswith((".", "~")) or source.model.count("/") != 1:
        raise ModelNotFound(f"no folder {source.model!r}. Give a head's folder, or a hub id (owner/name).")
    try:
        found, _ = PreTrainedConfig.get_config_dict(source.model)
    except (OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise ModelNotFound(
            f"no head {source.model!r}: there is no such folder, and the hub returned none ({first})."
        ) from error
    return found


def _check_kind(written: Mapping[str, Any], source: ModelSource) -> None:
    kind = written.get("speculators_model_type")
    if kind is None or "speculators_config" not in written:
        raise ConfigError(
            f"{source.model!r} is not a head in the format of the speculators library (its config.json has no "
            "speculators_config); convert it with `speculators convert`."
        )
    if kind != "eagle3":
        raise ConfigError(
            f"{source.model!r} is a head of kind {kind!r} and method is 'eagle3'; choose an EAGLE-3 head."
        )
    if not isinstance(written.get("transformer_layer_config"), dict):
        raise ModelError(f"the config of {source.model!r} has no transformer_layer_config, which describes its layers.")


def _layer_config(written: Mapping[str, Any], source: ModelSource) -> PreTrainedConfig:
    from transformers import AutoConfig

    values = dict(written)
    kind = values.pop("model_type", "llama")
    if kind not in LAYER_KINDS:
        raise UnsupportedModel(
            f"the layers of {source.model!r} are of model_type {kind!r}, and heads have layers of "
            f"{' or '.join(map(repr, LAYER_KINDS))} here.{did_you_mean(str(kind), LAYER_KINDS)}"
        )
    try:
        config: Any = AutoConfig.for_model(kind, **values)
    except Exception as error:  # config classes check their fields with their own error types
        raise ModelError(f"the transformer_layer_config of {source.model!r} is not valid: {error}") from error
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel(f"the layers of {source.model!r} have windows, which are not available in heads yet.")
    config._attn_implementation = ATTENTION_IMPLEMENTATION
    return config  # type: ignore[no-any-return]


def _places(written: object, num_layers: int, source: ModelSource) -> tuple[int, ...]:
    """Return the places whose hidden states the head reads, ascending."""
    if written is None:
        written = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
        if len(written) < 3:
            raise ConfigError(
                f"{source.model!r} names no eagle_aux_hidden_state_layer_ids, and a model of {num_layers} layers has "
                "no default for them; name them in the head's config."
            )
    is_list = isinstance(written, Sequence) and not isinstance(written, str) and len(written) > 0
    if not is_list or any(type(one) is not int for one in written):  # type: ignore[attr-defined]  # a sequence
        raise ConfigError(
            f"{source.model!r}: eagle_aux_hidden_state_layer_ids={written!r}; it must be a list of layers' numbers."
        )
    places: list[int] = list(written)  # type: ignore[call-overload]
    if places != sorted(set(places)) or not 0 <= places[0] <= places[-1] <= num_layers:
        raise ConfigError(
            f"{source.model!r}: eagle_aux_hidden_state_layer_ids={places}; they must ascend from 0 at least to "
            f"{num_layers}, the model's layers, at most. Was the head made for this model?"
        )
    return tuple(places)
