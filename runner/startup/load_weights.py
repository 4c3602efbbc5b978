"""A model without its weights, to be traced, and the same model with them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.lora.modules import lora_options
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import stand_in_for
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.tensor_parallel.expert_ranks import expert_ranks
from piecegraph.runner.tensor_parallel.parallel import Parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_stand_in(
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    stage: Stage | None,
    on_phase: OnPhase | None,
) -> tuple[LoadedModel | None, str]:
    """Return what `stand_in_for` returns, or no model where nothing is compiled while weights are loaded."""
    if config.compile.compiler == "eager":
        return None, ""
    with timed_phase(on_phase, "model"):
        return stand_in_for(
            config.source,
            hf_config,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            num_ranks=config.tensor_parallel_size,
            stage=stage,
            experts=expert_ranks(config),
            quantization=config.quantization,
            lora=lora_options(config),
        )


def load_weights(
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    stage: Stage | None,
    on_phase: OnPhase | None,
    *,
    parallel: Parallel | None,
) -> LoadedModel:
    """Return the model with its weights, and report its notes as phases."""
    rank = 0 if parallel is None else parallel.group.rank
    engine = 0 if parallel is None or parallel.peers is None else parallel.peers.engine
    loaded = load_model(
        config.source,
        hf_config,
        dtype=dtype,
        device=device,
        seed=config.seed,
        on_phase=on_phase,
        rank=rank,
        num_ranks=config.tensor_parallel_size,
        stage=stage,
        experts=expert_ranks(config, engine),
        quantization=config.quantization,
        lora=lora_options(config),
    )
    rules = apply_layer_rules(loaded.model, max_model_len)
    loaded = replace(loaded, notes=(*loaded.notes, *fix_longrope(loaded.model, max_model_len), *rules))
    for note in loaded.notes:
        if on_phase is not None:
            on_phase(Phase(name="load", detail=note))
    return loaded
