"""A model without its weights, to be traced, and the same model with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.kv_cache.scales import check_calibration
from piecegraph.runner.lora.modules import lora_options
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import model_without_weights, stand_in_of
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.state_layers.modules.replace import has_state_layers
from piecegraph.runner.tensor_parallel.expert_ranks import expert_ranks
from piecegraph.runner.tensor_parallel.parallel import Parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """The model of an engine before it is loaded."""

    config: EngineConfig
    hf_config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    stage: Stage | None
    on_phase: OnPhase | None

    def without_weights(self) -> tuple[LoadedModel | None, str]:
        """Return what `stand_in_of` returns, or no model where nothing is compiled while weights are loaded."""
        if self.config.compile.compiler == "eager":
            return None, ""
        with timed_phase(self.on_phase, "model"):
            stand_in, reason = stand_in_of(
                partial(
                    model_without_weights,
                    self.config.source,
                    self.hf_config,
                    dtype=self.dtype,
                    device=self.device,
                    max_model_len=self.max_model_len,
                    num_ranks=self.config.tensor_parallel_size,
                    stage=self.stage,
                    experts=expert_ranks(self.config),
                    quantization=self.config.quantization,
                    lora=lora_options(self.config),
                )
            )
        self._check(stand_in)
        return stand_in, reason

    def with_weights(self, parallel: Parallel | None) -> LoadedModel:
        """Return the model with its weights, and report its notes as phases."""
        rank = 0 if parallel is None else parallel.group.rank
        engine = 0 if parallel is None or parallel.peers is None else parallel.peers.engine
        loaded = load_model(
            self.config.source,
            self.hf_config,
            dtype=self.dtype,
            device=self.device,
            seed=self.config.seed,
            on_phase=self.on_phase,
            rank=rank,
            num_ranks=self.config.tensor_parallel_size,
            stage=self.stage,
            experts=expert_ranks(self.config, engine),
            quantization=self.config.quantization,
            lora=lora_options(self.config),
        )
        self._check(loaded)
        rules = apply_layer_rules(loaded.model, self.max_model_len)
        loaded = replace(loaded, notes=(*loaded.notes, *fix_longrope(loaded.model, self.max_model_len), *rules))
        for note in loaded.notes:
            if self.on_phase is not None:
                self.on_phase(Phase(name="load", detail=note))
        return loaded

    def _check(self, loaded: LoadedModel | None) -> None:
        """Raise `UnsupportedModel` for a model that cannot run as the config asks; None: it is not known yet."""
        if loaded is not None:
            check_calibration(self.config, has_states=has_state_layers(loaded.model))
