"""A language model compiled for a runner: trace, decide, compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.plan import SplitCall
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.select import BackendChoice, choose_backend
from piecegraph.runner.build_step import build_step
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.engine_config import EngineConfig, static_sizes
from piecegraph.runner.graph_plan import GraphPlan, plan_graphs
from piecegraph.runner.kv_cache_groups import KVCacheLayout, kv_cache_layout
from piecegraph.runner.model_loader import LoadedModel
from piecegraph.runner.model_support import check_layers
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.step_kernels import (
    NUM_TOKENS,
    AttentionAlone,
    StepKernels,
    compiles_kernels,
    launch_step_kernels,
)

_MEASURING = ("compile_sizes", "tune_sizes")
"""Phases in which static pieces are timed: nothing else may run on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """What follows from a model's graph before anything of it is compiled."""

    calls: tuple[SplitCall, ...]
    layers: tuple[AttentionLayer, ...]
    layout: KVCacheLayout
    attention: BackendChoice
    plan: GraphPlan


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
    decided: list[_Decided] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        decided.append(_decide(calls, loaded, config, max_model_len, max_num_tokens))

    def launch_kernels() -> None:
        _launch_kernels(decided[-1], loaded, config, max_model_len, max_num_tokens)

    kernels = StepKernels(launch_kernels, device)

    def load_late() -> CausalLMForward:
        weights = load()
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


def _decide(
    calls: tuple[SplitCall, ...], loaded: LoadedModel, config: EngineConfig, max_model_len: int, max_num_tokens: int
) -> _Decided:
    layers = attention_layers(calls)
    check_layers(layers, loaded.config)
    choice = choose_backend(config.attention_backend, layers, loaded.device, config.block_size)
    plan = plan_graphs(
        mode=CUDAGraphMode.parse(config.cudagraph_mode),
        capture_sizes=config.cudagraph_capture_sizes,
        backend=choice.backend,
        device=loaded.device,
        graph_kind=config.graph_kind,
        can_split=bool(layers),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        strict=config.strict,
    )
    layout = kv_cache_layout(layers, max_model_len=max_model_len, block_size=config.block_size)
    return _Decided(calls=calls, layers=layers, layout=layout, attention=choice, plan=plan)


def _launch_kernels(
    decided: _Decided, loaded: LoadedModel, config: EngineConfig, max_model_len: int, max_num_tokens: int
) -> None:
    """Those of a step, over buffers of its own, which are dropped again."""
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    backend = decided.attention.backend
    step = build_step(
        AttentionAlone(decided.calls, vocab_size=vocab_size, dtype=loaded.dtype, max_num_reqs=config.max_num_seqs),
        layers=decided.layers,
        layout=decided.layout,
        backend=backend,
        config=config,
        sampler=Sampler(
            max_num_reqs=min(NUM_TOKENS, config.max_num_seqs),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            device=loaded.device,
        ),
        max_num_tokens=max_num_tokens,
        device=loaded.device,
    )
    launch_step_kernels(step, max_model_len=max_model_len, needs_host_batch=backend.needs_host_batch)
