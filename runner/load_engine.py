"""From a config to an engine that answers: load, compile, cache. The lifecycle, in order."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.plan import SplitCall
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.select import BackendChoice, check_backend_name, choose_backend
from piecegraph.runner.capture_sizes import check_capture_sizes
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.cudagraph_manager import CudaGraphManager
from piecegraph.runner.dispatcher import Dispatcher
from piecegraph.runner.engine import Engine
from piecegraph.runner.engine_config import EngineConfig, batched_tokens, runs_ahead, static_sizes, static_sizes_note
from piecegraph.runner.graph_plan import GraphPlan, plan_graphs
from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.kv_cache import KVCache, allocate_kv_caches, bytes_per_block
from piecegraph.runner.memory import cpu_budget_bytes, gpu_budget_bytes, graph_budget_bytes, pick_num_blocks
from piecegraph.runner.model_length import model_length
from piecegraph.runner.model_loader import (
    LoadedModel,
    eos_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from piecegraph.runner.model_runner import ModelRunner
from piecegraph.runner.model_step import ModelStep
from piecegraph.runner.model_support import check_layers
from piecegraph.runner.profile import peak_activation_bytes
from piecegraph.runner.request_states import RequestStates
from piecegraph.runner.rope import fix_longrope
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.kv_cache_group import blocks_for
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything an `LLM` holds."""

    engine: Engine
    runner: ModelRunner
    compiled: CompiledModel
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    attention: BackendChoice
    plan: GraphPlan
    notes: tuple[str, ...]


def load_engine(config: EngineConfig, on_phase: OnPhase | None = None) -> Loaded:
    """Load, compile, give it a cache, capture. What cannot work is refused as early as it is known."""
    check_backend_name(config.attention_backend)
    device = resolve_device(config.device)
    max_num_tokens = batched_tokens(config, device.type)
    if config.cudagraph_capture_sizes is not None:
        check_capture_sizes(config.cudagraph_capture_sizes, max_num_tokens)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    max_model_len = model_length(hf_config, config.max_model_len)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.source, config.tokenizer)
    loaded = load_model(config.source, hf_config, dtype=dtype, device=device, seed=config.seed, on_phase=on_phase)
    notes = [*loaded.notes, *fix_longrope(loaded.model, max_model_len)]
    for note in notes:
        if on_phase is not None:
            on_phase(Phase(name="load", detail=note))
    model = _compile(loaded, config, max_num_tokens, on_phase)
    plan = model.plan
    graph_bytes = graph_budget_bytes(device) if plan.has_graphs else 0
    num_blocks, kv_caches = _allocate(model, config, device, max_model_len, max_num_tokens, graph_bytes, on_phase)
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    sampler = Sampler(
        max_num_reqs=config.max_num_seqs, max_model_len=max_model_len, vocab_size=vocab_size, device=device
    )
    runner = _runner(model, plan, config, kv_caches, sampler, max_num_tokens, graph_bytes, on_phase)
    engine = Engine(
        scheduler=Scheduler(
            kv_cache=KVCacheManager(
                num_blocks=num_blocks,
                block_size=config.block_size,
                max_num_batched_tokens=max_num_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            policy=SchedulingPolicy.PRIORITY,  # of equal priority, which is the default, the first comes first
        ),
        runner=runner,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(loaded.model),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        seed=config.seed,
        steps_ahead=int(runs_ahead(config, device.type)),
    )
    return Loaded(
        engine=engine,
        runner=runner,
        compiled=model.compiled,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        attention=model.attention,
        plan=plan,
        notes=(
            *notes,
            *(f"attention_backend: {reason}" for reason in model.attention.reasons if model.attention.is_fallback),
            *(f"cudagraph_mode: {reason}" for reason in plan.resolved.reasons),
            *static_sizes_note(config),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A compiled model, the attention found in its graph with what will run it, and the graphs to capture."""

    compiled: CompiledModel
    layers: tuple[AttentionLayer, ...]
    attention: BackendChoice
    plan: GraphPlan


def _compile(loaded: LoadedModel, config: EngineConfig, max_num_tokens: int, on_phase: OnPhase | None) -> _Model:
    """Trace, decide, compile: whatever the graph shows to be impossible is refused between the first two."""
    found: list[AttentionLayer] = []
    decided: list[tuple[BackendChoice, GraphPlan]] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        found.extend(attention_layers(calls))
        check_layers(found, loaded.config)
        choice = choose_backend(config.attention_backend, found, loaded.device, config.block_size)
        plan = plan_graphs(
            mode=CUDAGraphMode.parse(config.cudagraph_mode),
            capture_sizes=config.cudagraph_capture_sizes,
            backend=choice.backend,
            device=loaded.device,
            graph_kind=config.graph_kind,
            can_split=bool(found),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            strict=config.strict,
        )
        decided.append((choice, plan))

    sizes = static_sizes(config, is_cuda=loaded.device.type == "cuda")
    with torch.no_grad():
        compiled = compile_module(
            CausalLMForward(loaded.model),
            replace(config.compile, compile_sizes=sizes),
            dynamic_dims=DYNAMIC_DIMS,
            example_inputs=example_inputs(loaded.device),
            on_phase=on_phase,
            before_compile=decide,
        )
    ((choice, plan),) = decided
    return _Model(compiled=compiled, layers=tuple(found), attention=choice, plan=plan)


def _runner(
    model: _Model,
    plan: GraphPlan,
    config: EngineConfig,
    kv_caches: dict[str, KVCache],
    sampler: Sampler,
    max_num_tokens: int,
    graph_bytes: int,
    on_phase: OnPhase | None,
) -> ModelRunner:
    """The step over fixed buffers, its graphs captured."""
    device = next(iter(kv_caches.values())).key.device
    backend = model.attention.backend
    max_model_len = sampler.max_model_len
    max_blocks = blocks_for(max_model_len, config.block_size)
    step = ModelStep(
        forward=model.compiled,
        impl=backend.impl(),
        metadata_builder=backend.metadata_builder(
            model.layers, config.block_size, device, max_num_reqs=config.max_num_seqs
        ),
        kv_caches=kv_caches,
        states=RequestStates(
            max_num_reqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=max_blocks,
            device=device,
            keeps_host_blocks=backend.needs_host_batch,
        ),
        buffers=InputBuffers(
            max_num_tokens=max(max_num_tokens, config.max_num_seqs),
            max_num_reqs=config.max_num_seqs,
            max_blocks=max_blocks,
            device=device,
        ),
        sampler=sampler,
        block_size=config.block_size,
    )
    graphs = CudaGraphManager(
        step=step,
        compiled=model.compiled,
        max_model_len=max_model_len,
        needs_host_batch=backend.needs_host_batch,
        kind=config.graph_kind,
        strict=config.strict,
    )
    try:
        graphs.capture(full=plan.full, piecewise=plan.piecewise, max_bytes=graph_bytes or None, on_phase=on_phase)
    except BaseException:
        graphs.close()
        raise
    dispatcher = Dispatcher(
        full=graphs.descriptors(CUDAGraphMode.FULL),
        piecewise=graphs.descriptors(CUDAGraphMode.PIECEWISE),
        resolved=plan.resolved,
        failed=graphs.failed(),
        static_sizes=model.compiled.report().static_sizes,
    )
    return ModelRunner(
        step=step,
        graphs=graphs,
        dispatcher=dispatcher,
        needs_host_batch=backend.needs_host_batch,
        strict=config.strict,
    )


def _allocate(
    model: _Model,
    config: EngineConfig,
    device: torch.device,
    max_model_len: int,
    max_num_tokens: int,
    graph_bytes: int,
    on_phase: OnPhase | None,
) -> tuple[int, dict[str, KVCache]]:
    """The number of blocks, and the caches; `graph_bytes` are left to the graphs."""
    started = time.monotonic()
    layers = model.layers
    block_bytes = bytes_per_block(layers, config.block_size)
    if config.kv_cache_memory_bytes is not None:
        budget_bytes = config.kv_cache_memory_bytes
    elif device.type == "cpu":
        budget_bytes = cpu_budget_bytes(blocks_for(max_model_len, config.block_size) * block_bytes)
    else:
        num_logits = min(config.max_num_seqs, max_num_tokens)
        backend = model.attention.backend
        peak = peak_activation_bytes(model.compiled, layers, backend, max_num_tokens, num_logits, device)
        budget_bytes = gpu_budget_bytes(device, config.gpu_memory_utilization, peak + graph_bytes)
    num_blocks = pick_num_blocks(
        budget_bytes=budget_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_kv_blocks=config.num_kv_blocks,
    )
    kv_caches = allocate_kv_caches(layers, num_blocks, config.block_size, device)
    if on_phase is not None:
        detail = f"{num_blocks} blocks of {config.block_size} tokens, {num_blocks * block_bytes / 2**20:.0f} MiB"
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=detail))
    return num_blocks, kv_caches
