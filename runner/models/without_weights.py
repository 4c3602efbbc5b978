"""Construction of the model that `LLM` would run with fake tensors in place of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.errors import ConfigError, PiecegraphError
from piecegraph.progress import OnPhase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.lora.modules import LoraOptions, lora_options
from piecegraph.runner.models.config.device import resolve_device
from piecegraph.runner.models.config.dtype import resolve_dtype
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks, expert_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_without_weights(config: EngineConfig, on_phase: OnPhase | None = None) -> LoadedModel:
    """Return the model that `LLM` with this config would run, from the model's config alone.

    No weight file is read, and no memory is allocated for weights. The model can be traced and compiled, but not
    called. Raises what `LLM` raises for the model and the config, and `ConfigError` for a pipeline, whose stages are
    several models.
    """
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} makes a model of each stage, which only a start "
            "compiles so far; leave it out."
        )
    device = resolve_device(config.device)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device, config.quantization)
    max_model_len = model_length(hf_config, config.max_model_len, first_position(config.source, hf_config).value)
    return model_without_weights(
        config.source,
        hf_config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        num_ranks=config.tensor_parallel_size,
        experts=expert_ranks(config),
        quantization=config.quantization,
        lora=lora_options(config),
        on_phase=on_phase,
    )


def model_without_weights(
    source: ModelSource,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    num_ranks: int = 1,
    stage: Stage | None = None,
    experts: ExpertRanks | None = None,
    quantization: str | None = None,
    lora: LoraOptions | None = None,
    on_phase: OnPhase | None = None,
) -> LoadedModel:
    """Return the model that `load_model` and `fix_longrope` would make, with fake tensors.

    The shapes are those of any of `num_ranks`, or of those of a `stage` of a pipeline.
    """
    dummy = replace(source, load_format="dummy")
    loaded = load_model(
        dummy,
        config,
        dtype=dtype,
        device=torch.device("meta"),
        num_ranks=num_ranks,
        stage=stage,
        experts=experts,
        quantization=quantization,
        lora=lora,
        runs_on=device,
        on_phase=on_phase,
    )
    notes = (*fix_longrope(loaded.model, max_model_len), *apply_layer_rules(loaded.model, max_model_len))
    make_fake(loaded.model, device)
    if source.load_format != "dummy":
        model: Any = loaded.model
        model._use_kernels = False  # the value after loading a checkpoint with transformers
    return replace(loaded, device=device, notes=(*loaded.notes, *notes))


def stand_in_of(make: Callable[[], LoadedModel]) -> tuple[LoadedModel | None, str]:
    """Return what `make`, a call of `model_without_weights`, returns and "", or None and the reason why it cannot.

    A constructor that computes with values cannot run on fake tensors. Raises errors in the model or the config.
    """
    try:
        return make(), ""
    except PiecegraphError:
        raise
    except Exception as error:
        return None, f"the model cannot be constructed without values: {type(error).__name__}: {error}"


def make_fake(model: Any, device: torch.device) -> None:
    """Replace meta tensors of `model` by fake tensors on `device`; shared tensors stay shared.

    Each fake tensor wraps the existing meta tensor, because making it by an operation, as `Module._apply` would, takes
    ten times as long.
    """
    mode = FakeTensorMode()
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old tensor, which must live to keep its id

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            fake: Any = mode.fake_tensor_converter.from_meta_and_device(mode, tensor.detach(), device)
            fake._is_param = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = tensor, fake
        return made[id(tensor)][1]

    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            registry.update({name: on_device(tensor) for name, tensor in registry.items() if tensor is not None})
