"""The key by which a model would be looked up now, as `LLM` makes it, without reading weights. Imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.cache.store.store import Loaded
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.compiler.tracing.traced_sources import find_changed_module
from piecegraph.progress import OnPhase
from piecegraph.runner.common.config_on_device import options_on
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.speculative.heads.head_config import with_head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """The key of a model under a config. If there is none, `reason` says why nothing is stored for the model."""

    key: str | None
    factors: Mapping[str, Any]
    reason: str


def model_key(config: EngineConfig, on_phase: OnPhase | None = None) -> ModelKey:
    """Return the key that `LLM` with this config would look up in the cache.

    Raises what `LLM` would for the model and the config.
    """
    if config.speculative is not None:
        config, _ = with_head(config, load_config(config.source), needs_weights=False)
    loaded = load_without_weights(config, on_phase)
    device, module = loaded.device, CausalLMForward(loaded.model, loaded.first_position)
    compile = options_on(config, device.type)
    cache = CompileCache.open(compile)
    with torch.no_grad():
        call = ExampleCall.of(module, example_inputs(device), {}, DYNAMIC_DIMS)
        plans = PlanStore.of(cache, module, call, compile)
    if not cache.stores_plans:
        return ModelKey(key=None, factors=plans.factors, reason=cache.reason)
    return ModelKey(key=plans.key, factors=plans.factors, reason=plans.reason)


def changed_source(plan: Loaded) -> str | None:
    """Return the first module whose source differs from the traced one, or None.

    Such a module makes the entry a miss.
    """
    return find_changed_module(json.loads(plan.blobs["plan"])["sources"])
