"""Quantised weights of a model: how a checkpoint holds them, and their place in the model's modules."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.models.mechanisms.replaced_layers import compresses_keys
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.checkpoints.stored import StoredCheckpoint
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.runner.quantization.quantise import QuantisationSummary, quantise_model
from piecegraph.runner.state_layers.modules.replace import first_state_layer, has_state_layers
from piecegraph.runner.tensor_parallel.plan import RankPlan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def split_quantisation(config: PreTrainedConfig) -> tuple[StoredCheckpoint | None, PreTrainedConfig]:
    """Return how the weights of a checkpoint are quantised, or None, and the config of the model without it."""
    written = getattr(config, "quantization_config", None)
    if written is None:
        return None, config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return stored_checkpoint(written), plain


def quantise(
    model: PreTrainedModel,
    quantization: str | None,
    checkpoint: StoredCheckpoint | None,
    read: QuantisationSummary | None,
    device_type: str,
    plan: RankPlan | None,
) -> QuantisationSummary | None:
    """Quantise a model in place, unless it was `read` so or stays plain, and return the summary.

    `plan`: what will be left on this rank of a whole model. Raises `UnsupportedModel` for a kind that cannot be
    quantised yet.
    """
    if checkpoint is None and quantization is None:
        return None
    has_states = has_state_layers(model)
    if has_states or compresses_keys(model.config):
        what = f"layers with a state ({first_state_layer(model)})" if has_states else "latent attention (kv_lora_rank)"
        raise UnsupportedModel(
            f"{type(model).__name__} has {what}, with which quantised weights (quantization={quantization!r}) are not "
            "yet available; use unquantised ones."
        )
    if read is not None:
        return read
    shards = None if plan is None else plan.shards
    if checkpoint is None:
        assert quantization is not None
        scheme_of = online_schemes(quantization)
        return quantise_model(model, quantization, scheme_of, device_type=device_type, shards=shards)
    method, scheme_of = checkpoint.quant_method, checkpoint.scheme_of
    options: dict[str, Any] = {"device_type": device_type, "is_read": True, "must_fit": True, "shards": shards}
    return quantise_model(model, method, scheme_of, **options)
