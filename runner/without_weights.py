"""A model as `LLM` has it, but for the weights: fake tensors that say what the real ones would be like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.progress import OnPhase
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.model_length import model_length
from piecegraph.runner.model_loader import LoadedModel, load_config, load_model, resolve_device, resolve_dtype
from piecegraph.runner.rope import fix_longrope


def load_without_weights(config: EngineConfig, on_phase: OnPhase | None = None) -> LoadedModel:
    """The model that `LLM` with this config would have, from the model's config alone: no file of weights is read, and
    no memory is set aside for them. It can be traced, and compiled, and not called.

    Raises what `LLM` would for the model and the config.
    """
    device = resolve_device(config.device)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    source = replace(config.source, load_format="dummy")
    loaded = load_model(source, hf_config, dtype=dtype, device=torch.device("meta"), on_phase=on_phase)
    notes = fix_longrope(loaded.model, model_length(hf_config, config.max_model_len))
    _make_fake(loaded.model, device)
    if config.source.load_format != "dummy":
        model: Any = loaded.model
        model._use_kernels = False  # as transformers' loading leaves it
    return replace(loaded, device=device, notes=(*loaded.notes, *notes))


def _make_fake(model: Any, device: torch.device) -> None:
    """Turn meta tensors into fake ones on `device`; what was one tensor stays one."""
    mode = FakeTensorMode()
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old beside new: an id is of use while the old one lives

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[id(tensor)] = tensor, fake
        return made[id(tensor)][1]

    model._apply(on_device)
    model.tie_weights()
    model.requires_grad_(False)
