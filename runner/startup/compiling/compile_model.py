"""Compilation of a language model for the runner: trace it, derive what follows from its graph, compile it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.select import BackendChoice
from piecegraph.runner.common.config_on_device import options_on
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, after_passes
from piecegraph.runner.inspect.untraceable import refused_by_module
from piecegraph.runner.kv_cache.groups import KVCacheLayout
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.startup.compiling.decide import AllLayers, Decided, compile_step_kernels, decide_for
from piecegraph.runner.startup.compiling.step_kernels import (
    StepKernels,
    compiles_kernels,
)
from piecegraph.runner.state_layers.layer import StateLayer
from piecegraph.runner.step.model_step import needs_host_batches

_MEASURING = ("compile_sizes", "tune_sizes")
"""Phases in which static pieces are timed, so that nothing else may run on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLM:
    """A compiled model with the attention layers in its graph, their backend, and the CUDA graphs to capture."""

    compiled: CompiledModel
    config: EngineConfig  # with the block size that fits the layers
    layers: tuple[AttentionLayer, ...]
    state_layers: tuple[StateLayer, ...]
    layout: KVCacheLayout
    attention: BackendChoice
    plan: GraphPlan
    needs_host_batch: bool  # whether steps are planned on the host


def compile_model(
    stand_in: LoadedModel | None,
    load: Callable[[], LoadedModel],
    config: EngineConfig,
    max_model_len: int,
    max_num_tokens: int,
    on_phase: OnPhase | None,
    all_layers: AllLayers | None = None,
    *,
    background: BackgroundCompile | None = None,
) -> CompiledLM:
    """Trace and compile the model, and return it with everything that follows from its graph.

    A graph that cannot be served is refused before anything is compiled. If `stand_in` is given, it is traced instead
    of the model, and `load` loads the weights while the pieces compile; the kernels of a step are compiled then, too.
    `all_layers`: a function from the layers of this stage of a pipeline to those of all stages.
    With `background` there must be no `stand_in`: the pieces run as their graphs until it has compiled them. Kernels of
    a step are compiled before this returns, unless the model comes from the cache.
    """
    loaded = load() if stand_in is None else stand_in
    device = loaded.device
    decided: list[Decided] = []
    phases: set[str] = set()  # those that have begun

    def decide(calls: tuple[SplitCall, ...]) -> None:
        decided.append(decide_for(calls, loaded, config, max_model_len, max_num_tokens, all_layers))
        if background is not None and "trace" in phases and compiles_kernels(device):
            kernels.start()  # else the profile would compile them one after another

    kernels = StepKernels(lambda: compile_step_kernels(decided[-1], loaded, max_model_len, max_num_tokens), device)

    def load_late() -> torch.nn.Module:
        weights = load()  # before the kernels: loading changes the default dtype of every thread
        if decided and compiles_kernels(device):  # else nothing is compiled, or not yet
            kernels.start()
        return weights.forward_module()

    def wait_for_kernels() -> None:
        if kernels.is_running:
            with timed_phase(on_phase, "kernels"):
                kernels.wait()
                OWN_KERNELS.save()  # the kernels compiled since the pieces were stored

    def on_every_phase(phase: Phase) -> None:
        phases.add(phase.name)
        if phase.name in _MEASURING:
            wait_for_kernels()
        if on_phase is not None:
            on_phase(phase)

    try:
        with torch.no_grad(), refused_by_module(loaded.model):
            compiled = compile_module(
                loaded.forward_module(),
                options_on(config, device.type),
                dynamic_dims=loaded.dynamic_dims,
                example_inputs=loaded.example_inputs(device),
                on_phase=on_every_phase,
                before_compile=decide,
                load_weights=None if stand_in is None else load_late,
                background=background,
                waits_for_others=all_layers is not None,
            )
        wait_for_kernels()
    finally:
        kernels.wait()
    kernels.report(on_phase)
    last = decided[-1]
    return CompiledLM(
        compiled=compiled,
        config=last.config,
        layers=last.layers,
        state_layers=last.state_layers,
        layout=last.layout,
        attention=last.attention,
        plan=after_passes(last.plan, {row.name: row.matches for row in compiled.report().passes}, len(last.layers)),
        needs_host_batch=needs_host_batches(last.attention.backend, last.state_layers, device),
    )
