"""The scheduler of an engine, the engine's kind, and how many steps it launches ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.common.config_on_device import runs_ahead
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.lora.store import AdapterStore
from piecegraph.runner.pipeline_parallel.pipeline_scheduler import PipelineScheduler
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.lora_slots import LoraSlots
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.speculative.speculative_engine import SpeculativeEngine
from piecegraph.runner.speculative.speculative_scheduler import SpeculativeScheduler
from piecegraph.runner.startup.compiling.compile_model import CompiledLM
from piecegraph.runner.startup.memory.kv_caches import most_changed_tokens

if TYPE_CHECKING:
    pass


def engine_kind(config: EngineConfig) -> Callable[..., Engine]:
    if config.speculative is None:
        return Engine
    speculative = config.speculative
    return functools.partial(
        SpeculativeEngine, max_drafts=speculative.num_speculative_tokens, is_synthetic=speculative.is_synthetic
    )


def num_steps_ahead(config: EngineConfig, model: CompiledLM, device: torch.device) -> int:
    """Return how many steps are launched ahead.

    None are if attention plans with lengths on the host that drafts make vary. Raises `ConfigError` if steps ahead were
    asked for all the same. Each stage of a pipeline but the last has a batch of its own in flight.
    """
    if config.pipeline_parallel_size > 1:
        return config.pipeline_parallel_size - 1
    if config.speculative is None or not model.needs_host_batch:
        return int(runs_ahead(config, device.type))
    if config.async_scheduling and model.attention.backend.needs_host_batch:
        raise ConfigError(
            "async_scheduling=True launches a step before the lengths of requests with drafts are known, and attention "
            f"backend {model.attention.backend.name!r} plans with these lengths; leave it out, or choose another "
            "attention_backend."
        )
    if config.async_scheduling:
        raise ConfigError(
            "async_scheduling=True launches a step before the lengths of requests with drafts are known, and layers "
            f"with states ({model.state_layers[0].name}) are planned with these lengths on a GPU; leave it out."
        )
    return 0


def make_scheduler(
    config: EngineConfig,
    model: CompiledLM,
    num_blocks: int,
    max_num_tokens: int,
    steps_ahead: int,
    store: AdapterStore | None,
) -> Scheduler:
    """Return the scheduler over a KV cache of `num_blocks` blocks."""
    kind: Callable[..., Scheduler] = Scheduler
    if config.pipeline_parallel_size > 1:
        kind = functools.partial(PipelineScheduler, num_stages=config.pipeline_parallel_size)
    if config.speculative is not None:
        max_drafts = config.speculative.num_speculative_tokens
        kind = functools.partial(
            SpeculativeScheduler,
            max_drafts=max_drafts,
            is_ahead=steps_ahead > 0,
            is_uniform=any(one.uniform_token_count == 1 + max_drafts for one in model.plan.full),
            num_slots_ahead=0 if config.speculative.method == "ngram" else max_drafts,
            stops_when_slower=config.speculative.stops_when_slower,
            is_synthetic=config.speculative.is_synthetic,
        )
    return kind(
        kv_cache=KVCacheManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_batched_tokens=most_changed_tokens(config, max_num_tokens),
            groups=model.layout.groups,
            enable_prefix_caching=config.enable_prefix_caching is not False,
            cached_states=config.cached_states,
        ),
        lora_slots=None if store is None else LoraSlots(config.max_loras, store.pinned_digests),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        policy=SchedulingPolicy.PRIORITY,  # first come, first served among equal priorities, which is the default
    )
