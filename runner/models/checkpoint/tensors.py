"""The comparison of a checkpoint's tensors with those of the model that its config describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from piecegraph.errors import CheckpointError
from piecegraph.runner.common.model_source import ModelSource

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


def check_tensors(source: ModelSource, info: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise `CheckpointError` unless the checkpoint has the tensors of the model with `config`, and no others.

    Layers for multi-token prediction, which follow the model's, are no part of it.
    """
    missing = sorted(info["missing_keys"])
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None) or getattr(text, "num_nextn_predict_layers", None) or 0
    of_prediction = tuple(f"layers.{text.num_hidden_layers + place}." for place in range(count))
    unexpected = sorted(name for name in info["unexpected_keys"] if not any(each in name for each in of_prediction))
    mismatched = sorted(
        f"{name} (checkpoint {tuple(found)}, model {tuple(wanted)})" for name, found, wanted in info["mismatched_keys"]
    )
    problems = [
        f"{len(names)} {what}: {_shorten(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {source.model!r} do not fit its config; tensors {'; '.join(problems)}. "
            "Check that config.json belongs to these weights."
        )


def _shorten(names: list[str], limit: int = 20) -> str:
    more = f", ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
