"""The module that is compiled for pooling: a transformers model without its head on a flattened batch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.varlen.call import VARLEN_OP, VarlenCall
from piecegraph.runner.attention.varlen.transformers_varlen import VARLEN_IMPLEMENTATION
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import CountedPositions, counts_positions
from piecegraph.runner.models.common.model_kind import ModelKind
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.support import causality
from piecegraph.runner.pooling.task import PoolingTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from piecegraph.progress import OnPhase

DYNAMIC_DIMS = {
    "input_ids": {0: "num_tokens"},
    "positions": {0: "num_tokens"},
    "token_type_ids": {0: "num_tokens"},
}

_EMBEDDING = ModelKind(
    auto_class="AutoModel",
    mapping="MODEL_MAPPING",
    name="model without a head",
    attention=VARLEN_IMPLEMENTATION,
    inputs=("position_ids",),
    options={"add_pooling_layer": False},  # nothing reads it, and many checkpoints lack its weights
    ignores_other_weights=True,
)
_CLASSIFICATION = ModelKind(
    auto_class="AutoModelForSequenceClassification",
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    name="classifier of texts",
    attention=VARLEN_IMPLEMENTATION,
    inputs=(),  # those of the model below the head are checked
)
KINDS = {PoolingTask.EMBED: _EMBEDDING, PoolingTask.CLASSIFY: _CLASSIFICATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModel:
    """A loaded model with the part below its head, which is compiled."""

    loaded: LoadedModel
    backbone: nn.Module

    @property
    def takes_token_types(self) -> bool:
        """Return whether the model distinguishes the first text of a pair from the second."""
        num_types = getattr(self.loaded.config, "type_vocab_size", 0) or 0
        return num_types > 1 and "token_type_ids" in inspect.signature(self.backbone.forward).parameters

    @property
    def is_encoder(self) -> bool:
        """Return whether every attention lets tokens see what comes after them."""
        return bool(found := causality(self.backbone)) and not any(found)

    def forward_module(self) -> BackboneForward:
        """Return the module that is compiled."""
        return BackboneForward(self.backbone, self.loaded.first_position, self.takes_token_types)


def load_pooling_model(
    source: ModelSource,
    config: PreTrainedConfig,
    task: PoolingTask,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    on_phase: OnPhase | None = None,
) -> PoolingModel:
    """Load the model that a task needs. Raises what `load_model` raises."""
    kind = KINDS[task]
    if source.load_format != "dummy" and task is PoolingTask.CLASSIFY:
        _check_has_head(config)
    loaded = load_model(source, config, dtype=dtype, device=device, seed=seed, on_phase=on_phase, kind=kind)
    model: Any = loaded.model
    backbone = model if task is PoolingTask.EMBED else getattr(model, model.base_model_prefix, None)
    if not isinstance(backbone, nn.Module):
        raise UnsupportedModel(f"{type(model).__name__} has no part below its head that could be compiled by itself.")
    return PoolingModel(loaded=loaded, backbone=backbone)


def _check_has_head(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` if a checkpoint has no head, whose weights would be random."""
    architecture = next(iter(config.architectures or ()), "")
    if "SequenceClassification" not in architecture:
        raise UnsupportedModel(
            f"the model's config names the architecture {architecture or 'None'!r}, which has no classifier, so its "
            "weights would be random. Use a model for sequence classification, or embed texts: convert='embed'."
        )


class BackboneForward(nn.Module):
    """A model without its head over the flattened tokens of all texts. Attention finds the texts' bounds by itself."""

    def __init__(self, model: nn.Module, first_position: int, takes_token_types: bool) -> None:
        super().__init__()
        self.model = model
        self.first_position = first_position
        self.takes_token_types = takes_token_types
        self.takes_use_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.counts_positions = counts_positions(type(model))

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        token_type_ids: torch.Tensor,  # [num_tokens] int64
    ) -> torch.Tensor:
        """Return hidden states `[num_tokens, hidden_size]`. `positions` count from 0 in each text."""
        if self.first_position:
            positions = positions + self.first_position
        options: dict[str, Any] = {}
        if self.takes_token_types:
            options["token_type_ids"] = token_type_ids[None]
        if self.takes_use_cache:
            options["use_cache"] = False
        if self.counts_positions:
            with CountedPositions(positions):
                output = self.model(input_ids=input_ids[None], **options)
        else:
            output = self.model(input_ids=input_ids[None], position_ids=positions[None], **options)
        hidden_states: torch.Tensor = output.last_hidden_state[0]
        return hidden_states


def example_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs to trace with; the trace does not depend on their sizes."""
    positions = torch.arange(8, device=device)
    return torch.zeros_like(positions), positions, torch.zeros_like(positions)


def check_calls(calls: tuple[SplitCall, ...], config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` if a traced model asks its attention for what cannot run, or contradicts its config.

    No masks are built, so a window that a model passes only to its mask would be lost.
    """
    text_config = config.get_text_config()
    layers = [VarlenCall(*call.args) for call in calls if call.op == VARLEN_OP]
    for layer in layers:
        if layer.unsupported:
            raise UnsupportedModel(f"{layer.layer}: {layer.unsupported}")
    num_layers = text_config.num_hidden_layers
    if len(layers) < num_layers:
        raise UnsupportedModel(
            f"only {len(layers)} of {num_layers} layers call attention; the others work in a way that cannot run here."
        )
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types and len(layer_types) == len(layers):
        for layer, layer_type in zip(layers, layer_types, strict=True):
            if (layer_type == "sliding_attention") != bool(layer.window):
                raise UnsupportedModel(
                    f"{layer.layer} is {layer_type} by the config, but its attention was called with "
                    + (f"a window of {layer.window}." if layer.window else "no window.")
                )
