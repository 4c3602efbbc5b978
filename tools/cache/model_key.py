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
from piecegraph.runner.without_weights import load_without_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """Of a model under a config. Without a key, `reason` says why nothing is kept of it."""

    key: str | None
    factors: Mapping[str, Any]
    reason: str


def model_key(config: EngineConfig, on_phase: OnPhase | None = None) -> ModelKey:
    """What `LLM` with this config would look for in the cache.

    Raises what `LLM` would for the model and the config.
    """
    loaded = load_without_weights(config, on_phase)
    device, module = loaded.device, CausalLMForward(loaded.model)
    compile = replace(config.compile, compile_sizes=static_sizes(config, is_cuda=device.type == "cuda"))
    cache = CompileCache.open(compile)
    with torch.no_grad():
        call = ExampleCall.of(module, example_inputs(device), {}, DYNAMIC_DIMS)
        plans = PlanStore.of(cache, module, call, compile)
    if not cache.keeps_plans:
        return ModelKey(key=None, factors=plans.factors, reason=cache.reason)
    return ModelKey(key=plans.key, factors=plans.factors, reason=plans.reason)


def changed_source(plan: Loaded) -> str | None:
    """The first module whose source is no longer what was traced, which makes a miss of the entry; None: all are."""
    return changed_module(json.loads(plan.blobs["plan"])["sources"])
