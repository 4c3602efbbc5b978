"""The key that a model would be looked up by now, as `LLM` makes it, without reading weights. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.cache.store import Loaded
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.plan_store import PlanStore
from piecegraph.compiler.trace import ExampleCall
from piecegraph.compiler.traced_sources import changed_module
from piecegraph.progress import OnPhase
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.engine_config import EngineConfig, static_sizes
from piecegraph.runner.model_length import model_length
from piecegraph.runner.model_loader import load_config, load_model, resolve_device, resolve_dtype
from piecegraph.runner.rope import fix_longrope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """Of a model under a config. Without a key, `reason` says why nothing is kept of it."""

    key: str | None
    factors: Mapping[str, Any]
    reason: str


def model_key(config: EngineConfig, on_phase: OnPhase | None = None) -> ModelKey:
    """What `LLM` with this config would look for in the cache. Room for weights is set aside and not filled.

    Raises what `LLM` would for the model and the config.
    """
    device = resolve_device(config.device)
    module = CausalLMForward(_model_without_weights(config, device, on_phase))
    compile = replace(config.compile, compile_sizes=static_sizes(config, is_cuda=device.type == "cuda"))
    cache = CompileCache.open(compile)
    with torch.no_grad():
        call = ExampleCall.of(module, example_inputs(device), {}, DYNAMIC_DIMS)
        plans = PlanStore.of(cache, module, call, compile)
    if not cache.keeps_plans:
        return ModelKey(key=None, factors=plans.factors, reason=cache.reason)
    return ModelKey(key=plans.key, factors=plans.factors, reason=plans.reason)


def _model_without_weights(config: EngineConfig, device: torch.device, on_phase: OnPhase | None) -> Any:
    """The model as `LLM` loads it, with whatever lies in memory for weights."""
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    source = replace(config.source, load_format="dummy")
    model: Any = load_model(source, hf_config, dtype=dtype, device=torch.device("meta"), on_phase=on_phase).model
    fix_longrope(model, model_length(hf_config, config.max_model_len))
    _make_room(model, device)
    if config.source.load_format != "dummy":
        model._use_kernels = False  # as transformers' loading leaves it
    return model


def _make_room(model: Any, device: torch.device) -> None:
    """Turn meta tensors into ones on `device`, values left as they come; what was one tensor stays one."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old beside new: an id is of use while the old one lives

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=device)
        return made[id(tensor)][1]

    model._apply(on_device)
    model.tie_weights()
    model.requires_grad_(False)


def changed_source(plan: Loaded) -> str | None:
    """The first module whose source is no longer what was traced, which makes a miss of the entry; None: all are."""
    return changed_module(json.loads(plan.blobs["plan"])["sources"])
