"""The runner of an engine: its step over fixed buffers, its cache, and its captured graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.cudagraphs.measured_times import why_not_measured
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.kv_cache.budget import graph_budget_bytes
from piecegraph.runner.late_start.fast_start import FastStart
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.speculative.drafter import Drafter, slots_tensor
from piecegraph.runner.speculative.heads.head_step import HeadedStep, headed_step
from piecegraph.runner.speculative.speculative_runner import SpeculativeRunner
from piecegraph.runner.speculative.speculative_step import SpeculativeStep, speculative_step
from piecegraph.runner.startup.compiling.compile_model import CompiledLM
from piecegraph.runner.startup.drafts.draft import (
    CompiledDraft,
    capture_drafter,
    make_drafter,
)
from piecegraph.runner.startup.drafts.head import CompiledHead, make_head_drafter
from piecegraph.runner.startup.loaded import Mapped
from piecegraph.runner.startup.memory.kv_caches import allocate_caches, fill_caches
from piecegraph.runner.startup.memory.mapped_weights import map_weights
from piecegraph.runner.step.model_step import ModelStep, build_step
from piecegraph.runner.step.prompt_embeds import EmbedsForward

if TYPE_CHECKING:
    pass


class MadeRunner(NamedTuple):
    """A runner and what belongs to it."""

    runner: ModelRunner
    num_blocks: int  # of the KV cache
    start: FastStart | None  # what remains of the start
    mapped: Mapped | None  # see `Loaded.mapped`


def make_runner(
    model: CompiledLM,
    draft: CompiledDraft | None,
    config: EngineConfig,
    sampler: Sampler,
    max_num_tokens: int,
    over_embeds: EmbedsForward | None,
    device: torch.device,
    on_phase: OnPhase | None,
    background: BackgroundCompile | None,
    loaded: LoadedModel,
    staged: Callable[[ModelStep], ModelStep] | None = None,
    runner_kind: Callable[..., ModelRunner] | None = None,
) -> MadeRunner:
    """Return the runner, with its graphs captured, the number of blocks of its KV cache, and the rest of the start.

    With `background` no graph is captured, and memory for graphs is set aside.
    """
    plan = model.plan
    with timed_phase(on_phase, "buffers"):
        step = _step_of(model, config, sampler, max_num_tokens, device)
        slots = None if draft is None else slots_tensor(config.max_num_seqs, device)
        num_slots = None if slots is None else slots.gpu[0]
        speculative = None if config.speculative is None else speculative_step(step, config.speculative, num_slots)
    if speculative is not None and isinstance(draft, CompiledHead):
        speculative = headed_step(speculative, draft.head.hidden_size, draft.loaded.dtype)
    step = step if speculative is None else speculative
    step = step if staged is None else staged(step)
    weights = map_weights(config, loaded, model.compiled, on_phase)
    cache = allocate_caches(model, draft, config, step, max_num_tokens, on_phase)
    step = replace(step, kv_caches=cache.kv_caches, state_caches=cache.state_caches, embeds_forward=over_embeds)
    graphs = CudaGraphManager(
        step=step,
        compiled=model.compiled,
        max_model_len=sampler.max_model_len,
        needs_host_batch=model.needs_host_batch,
        kind=config.graph_kind,
        strict=config.strict,
    )
    drafter = None
    try:
        if background is None:
            graphs.capture(
                full=plan.full,
                piecewise=plan.piecewise,
                max_bytes=cache.max_graph_bytes,
                measures=config.measure_graphs and not why_not_measured(config),
                on_phase=on_phase,
            )
        if draft is not None:
            assert isinstance(step, SpeculativeStep) and slots is not None
            drafter = _drafter(draft, step, slots)
            capture_drafter(drafter, draft, config, cache.max_graph_bytes, on_phase)
        graph_bytes = graphs.device_bytes + (0 if drafter is None else drafter.graph_bytes)
        set_aside = graph_budget_bytes(device) if background is not None and plan.has_graphs else 0
        fill_caches(cache, graph_bytes, set_aside, device, on_phase)
    except BaseException:
        if drafter is not None:
            drafter.close()
        graphs.close()
        raise
    speculative_kind = functools.partial(SpeculativeRunner, drafter=drafter)
    runner = (runner_kind or (ModelRunner if speculative is None else speculative_kind))(
        step=step,
        graphs=graphs,
        dispatcher=graphs.dispatcher(plan.resolved, model.compiled.report().static_sizes),
        needs_host_batch=model.needs_host_batch,
        strict=config.strict,
        adapted=loaded.adapted,
    )
    mapped = None if weights is None or cache.memory is None else Mapped(weights, cache.memory)
    max_bytes = set_aside or cache.max_graph_bytes
    rest = None if background is None else FastStart(background, model.compiled, runner, plan, max_bytes, config)
    return MadeRunner(runner, cache.num_blocks, rest, mapped)


def _step_of(
    model: CompiledLM, config: EngineConfig, sampler: Sampler, max_num_tokens: int, device: torch.device
) -> ModelStep:
    """Return a step of the model over new buffers, before its cache is allocated."""
    return build_step(
        model.compiled,
        layers=model.layers,
        state_layers=model.state_layers,
        layout=model.layout,
        backend=model.attention.backend,
        config=config,
        sampler=sampler,
        max_num_tokens=max_num_tokens,
        device=device,
    )


def _drafter(draft: CompiledDraft, step: SpeculativeStep, slots: Any) -> Drafter:
    """Return what drafts with `draft`, a model or a head, for the requests of `step`."""
    if not isinstance(draft, CompiledHead):
        return make_drafter(draft, step, slots)
    assert isinstance(step, HeadedStep)
    return make_head_drafter(draft, step, slots)
