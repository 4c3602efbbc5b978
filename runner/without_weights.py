"""A model as `LLM` has it, but for the weights: fake tensors that say what the real ones would be like."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.errors import PiecegraphError
from piecegraph.progress import OnPhase
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.model_length import model_length
from piecegraph.runner.model_loader import (
    LoadedModel,
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
)
from piecegraph.runner.model_source import ModelSource
from piecegraph.runner.rope import fix_longrope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_without_weights(config: EngineConfig, on_phase: OnPhase | None = None) -> LoadedModel:
    """The model that `LLM` with this config would have, from the model's config alone: no file of weights is read, and
    no memory is set aside for them. It can be traced, and compiled, and not called.

    Raises what `LLM` would for the model and the config.
    """
    device = resolve_device(config.device)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    max_model_len = model_length(hf_config, config.max_model_len)
    return model_without_weights(
        config.source, hf_config, dtype=dtype, device=device, max_model_len=max_model_len, on_phase=on_phase
    )


def model_without_weights(
    source: ModelSource,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    on_phase: OnPhase | None = None,
) -> LoadedModel:
    """As `load_model` and `fix_longrope` leave it, with fake tensors."""
    dummy = replace(source, load_format="dummy")
    loaded = load_model(dummy, config, dtype=dtype, device=torch.device("meta"), on_phase=on_phase)
    notes = fix_longrope(loaded.model, max_model_len)
    _make_fake(loaded.model, device)
    if source.load_format != "dummy":
        model: Any = loaded.model
        model._use_kernels = False  # as transformers' loading leaves it
    return replace(loaded, device=device, notes=(*loaded.notes, *notes))


def stand_in_for(
    source: ModelSource, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> tuple[LoadedModel | None, str]:
    """`model_without_weights` where there can be one, else why not: a model's own code may compute with values while
    it is made. Raises what is wrong with the model or the config."""
    try:
        return model_without_weights(source, config, dtype=dtype, device=device, max_model_len=max_model_len), ""
    except PiecegraphError:
        raise
    except Exception as error:
        return None, f"it cannot be made without values: {type(error).__name__}: {error}"


def _make_fake(model: Any, device: torch.device) -> None:
    """Turn meta tensors into fake ones on `device`; what was one tensor stays one.

    A fake tensor over the meta tensor there is: made by an operation, as `Module._apply` would, each takes ten times
    as long.
    """
    mode = FakeTensorMode()
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old beside new: an id is of use while the old one lives

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            fake: Any = mode.fake_tensor_converter.from_meta_and_device(mode, tensor.detach(), device)
            fake._is_param = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = tensor, fake
        return made[id(tensor)][1]

    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            registry.update({name: on_device(tensor) for name, tensor in registry.items() if tensor is not None})
