"""A language model compiled for a runner: trace, decide, compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.plan import SplitCall
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.select import BackendChoice
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.decide import Decided, compile_step_kernels, decide_for
from piecegraph.runner.engine_config import EngineConfig, static_sizes
from piecegraph.runner.graph_plan import GraphPlan
from piecegraph.runner.kv_cache_groups import KVCacheLayout
from piecegraph.runner.model_loader import LoadedModel
from piecegraph.runner.step_kernels import (
    StepKernels,
    compiles_kernels,
)

_MEASURING = ("compile_sizes", "tune_sizes")
"""Phases in which static pieces are timed: nothing else may run on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLM:
    """A compiled model, the attention found in its graph with what will run it, and the graphs to capture."""

    compiled: CompiledModel
    layers: tuple[AttentionLayer, ...]
    layout: KVCacheLayout
    attention: BackendChoice
    plan: GraphPlan


def compile_model(
    stand_in: LoadedModel | None,
    load: Callable[[], LoadedModel],
    config: EngineConfig,
    max_model_len: int,
    max_num_tokens: int,
    on_phase: OnPhase | None,
) -> CompiledLM:
    """Trace, decide, compile: whatever the graph shows to be impossible is refused between the first two. What is
    traced is `stand_in` where there is one; while it compiles weights are loaded, and kernels of a step compiled too.
    """
    loaded = load() if stand_in is None else stand_in
    device = loaded.device
    decided: list[Decided] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        decided.append(decide_for(calls, loaded, config, max_model_len, max_num_tokens))

    def launch_kernels() -> None:
        compile_step_kernels(decided[-1], loaded, config, max_model_len, max_num_tokens)

    kernels = StepKernels(launch_kernels, device)

    def load_late() -> CausalLMForward:
        weights = load()  # first: while it loads, every thread's tensors have the model's dtype by default
        if decided and compiles_kernels(device):  # else nothing compiles, or not yet
            kernels.start()
        return CausalLMForward(weights.model)

    def wait_for_kernels() -> None:
        if kernels.is_running:
            with timed_phase(on_phase, "kernels"):
                kernels.wait()
                OWN_KERNELS.keep()  # what was compiled since the pieces were kept

    def on_every_phase(phase: Phase) -> None:
        if phase.name in _MEASURING:
            wait_for_kernels()
        if on_phase is not None:
            on_phase(phase)

    sizes = static_sizes(config, is_cuda=device.type == "cuda")
    try:
        with torch.no_grad():
            compiled = compile_module(
                CausalLMForward(loaded.model),
                replace(config.compile, compile_sizes=sizes),
                dynamic_dims=DYNAMIC_DIMS,
                example_inputs=example_inputs(device),
                on_phase=on_every_phase,
                before_compile=decide,
                load_weights=None if stand_in is None else load_late,
            )
        wait_for_kernels()
    finally:
        kernels.wait()
    kernels.tell(on_phase)
    last = decided[-1]
    return CompiledLM(
        compiled=compiled, layers=last.layers, layout=last.layout, attention=last.attention, plan=last.plan
    )
