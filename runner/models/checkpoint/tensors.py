"""The comparison of a checkpoint's tensors with those of the model that its config describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.errors import CheckpointError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.quantization.checkpoints.cache_scales import is_cache_scale

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def without_other_parts(
    model: PreTrainedModel, config: PreTrainedConfig, info: Mapping[str, Any], *, is_pooling: bool
) -> Mapping[str, Any]:
    """Return `info` without unexpected tensors of parts that the model does not have.

    For a model that pools (`is_pooling`) that is the head. For the text model of several modalities it is the towers:
    modules that lie beside those of the text model, or within its outermost one.
    """
    if is_pooling:
        return {**info, "unexpected_keys": ()}
    if config.get_text_config(decoder=True) is config:
        return info
    prefix = f"{model.base_model_prefix}."

    def module(name: str) -> str:
        return name.removeprefix(prefix).partition(".")[0]

    own = {module(name) for name in model.state_dict()}
    return {**info, "unexpected_keys": [name for name in info["unexpected_keys"] if module(name) in own]}


def without_prediction(names: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """Return the names of tensors but for those of layers for multi-token prediction, which follow the model's."""
    of_prediction = prediction_layers(config)
    return [name for name in names if not any(layer in name for layer in of_prediction)]


def prediction_layers(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return what the names of tensors of layers for multi-token prediction have in them, such as "layers.32."."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None) or getattr(text, "num_nextn_predict_layers", None) or 0
    return tuple(f"layers.{text.num_hidden_layers + place}." for place in range(count))


def check_tensors(source: ModelSource, info: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise `CheckpointError` unless the checkpoint has the tensors of the model with `config`, and no others.

    Layers for multi-token prediction, which follow the model's, are no part of it, and neither are the scales of cached
    keys and values in safetensors files, which `stored_scales` reads.
    """
    reads_scales = bool(source.weight_files) and all(file.suffix == ".safetensors" for file in source.weight_files)
    others = [name for name in info["unexpected_keys"] if not (reads_scales and is_cache_scale(name))]
    unexpected = without_prediction(others, config)
    refuse_tensors(source, missing=info["missing_keys"], unexpected=unexpected, mismatched=info["mismatched_keys"])


def refuse_tensors(
    source: ModelSource,
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    owner: str = "model",
) -> None:
    """Raise `CheckpointError` if there is a tensor in one of these lists.

    `mismatched`: name, shape in the checkpoint, and shape in the `owner`, which is the model or the head of it.
    """
    shapes = [f"{name} (checkpoint {tuple(found)}, {owner} {tuple(wanted)})" for name, found, wanted in mismatched]
    problems = [
        f"{len(names)} {what}: {_shorten(names)}"
        for what, names in (
            ("missing", sorted(missing)),
            ("unexpected", sorted(unexpected)),
            ("of another shape", sorted(shapes)),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {source.model!r} do not fit its config; tensors {'; '.join(problems)}. "
            "Check that config.json belongs to these weights."
        )


def _shorten(names: Sequence[str], limit: int = 20) -> str:
    more = f", ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
