"""From a config to an engine that answers: load, compile, cache. The lifecycle, in order."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.passes.library_products import noting_products
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.read_ahead import ReadAhead
from piecegraph.runner.attention.select import BackendChoice, check_backend_name
from piecegraph.runner.build_step import build_step
from piecegraph.runner.cache_allocation import CacheAllocation, CacheSizes, allocate_given, allocate_on_gpu
from piecegraph.runner.capture_sizes import check_capture_sizes
from piecegraph.runner.compile_model import CompiledLM, compile_model
from piecegraph.runner.cudagraph_manager import CudaGraphManager
from piecegraph.runner.dispatcher import Dispatcher
from piecegraph.runner.engine import Engine
from piecegraph.runner.engine_config import EngineConfig, batched_tokens, runs_ahead, static_sizes_note
from piecegraph.runner.graph_plan import GraphPlan
from piecegraph.runner.kept_products import KeptProducts
from piecegraph.runner.kv_cache import KVCache, allocate_kv_caches, as_pages, bytes_per_block
from piecegraph.runner.library_ahead import LibraryAhead
from piecegraph.runner.model_length import model_length
from piecegraph.runner.model_loader import (
    LoadedModel,
    check_weight_files,
    eos_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from piecegraph.runner.model_runner import ModelRunner
from piecegraph.runner.model_step import ModelStep
from piecegraph.runner.profile import measure_step
from piecegraph.runner.rope import fix_longrope
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.step_memory import KeptStepMemory, kept_or_measured
from piecegraph.runner.without_weights import stand_in_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.runner.selfcheck import SelfcheckReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything an `LLM` holds."""

    hf_config: PretrainedConfig
    engine: Engine
    runner: ModelRunner
    compiled: CompiledModel
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    attention: BackendChoice
    plan: GraphPlan
    notes: tuple[str, ...]
    selfcheck: SelfcheckReport | None  # None: it was not asked for


def load_engine(config: EngineConfig, on_phase: OnPhase | None, ahead: ReadAhead) -> Loaded:
    """Load, compile, give it a cache, capture. What cannot work is refused as early as it is known. `ahead`, which
    reads the files of weights, is stopped once they are loaded."""
    check_backend_name(config.attention_backend)
    with timed_phase(on_phase, "device"):  # torch's first look at it, for which the context has to be there
        device = resolve_device(config.device)
    max_num_tokens = batched_tokens(config, device.type)
    if config.cudagraph_capture_sizes is not None:
        check_capture_sizes(config.cudagraph_capture_sizes, max_num_tokens)
    with timed_phase(on_phase, "config"):
        hf_config = load_config(config.source)
        dtype = resolve_dtype(config.dtype, hf_config, device)
        max_model_len = model_length(hf_config, config.max_model_len)
        products = KeptProducts.open(config, hf_config, dtype, device)
    asked = _Asked(device, hf_config, dtype, max_model_len, max_num_tokens)
    library = LibraryAhead(device) if products is None else LibraryAhead(device, products.load)
    library.start()
    try:
        return _load(asked, library, products, config, on_phase, ahead)
    finally:
        library.wait()  # nothing of it may run while the process ends


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is known of an engine before its model is made."""

    device: torch.device
    hf_config: PretrainedConfig
    dtype: torch.dtype
    max_model_len: int
    max_num_tokens: int  # of a step


def _load(
    asked: _Asked,
    library: LibraryAhead,
    products: KeptProducts | None,
    config: EngineConfig,
    on_phase: OnPhase | None,
    ahead: ReadAhead,
) -> Loaded:
    """`load_engine`, from there."""
    device, hf_config, dtype = asked.device, asked.hf_config, asked.dtype
    max_model_len, max_num_tokens = asked.max_model_len, asked.max_num_tokens
    tokenizer = None
    if not config.skip_tokenizer_init:
        with timed_phase(on_phase, "tokenizer"):
            tokenizer = load_tokenizer(config.source, config.tokenizer)
    check_weight_files(config.source)

    @functools.cache
    def load() -> LoadedModel:
        loaded = load_model(config.source, hf_config, dtype=dtype, device=device, seed=config.seed, on_phase=on_phase)
        ahead.stop(on_phase)
        loaded = replace(loaded, notes=(*loaded.notes, *fix_longrope(loaded.model, max_model_len)))
        for note in loaded.notes:
            if on_phase is not None:
                on_phase(Phase(name="load", detail=note))
        return loaded

    stand_in, weights_first = None, ""
    if config.compile.compiler != "eager":  # else nothing compiles while weights are loaded
        with timed_phase(on_phase, "model"):
            stand_in, weights_first = stand_in_for(
                config.source, hf_config, dtype=dtype, device=device, max_model_len=max_model_len
            )
    model = compile_model(stand_in, load, config, max_model_len, max_num_tokens, on_phase)
    loaded, plan = load(), model.plan
    weights_first = weights_first or model.compiled.report().weights_first
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    with timed_phase(on_phase, "buffers"):
        sampler = Sampler(
            max_num_reqs=config.max_num_seqs, max_model_len=max_model_len, vocab_size=vocab_size, device=device
        )
    library.wait()
    with noting_products() as noted:
        runner, num_blocks = _runner(model, plan, config, sampler, max_num_tokens, device, on_phase)
    key = model.compiled.report().cache.key
    if products is not None and key is not None:
        products.keep(noted, key)
    with timed_phase(on_phase, "engine"):
        engine = Engine(
            scheduler=Scheduler(
                kv_cache=KVCacheManager(
                    num_blocks=num_blocks,
                    block_size=config.block_size,
                    max_num_batched_tokens=max_num_tokens,
                    groups=model.layout.groups,
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
    checked: SelfcheckReport | None = None
    if config.compile.selfcheck:
        checked = _selfcheck(loaded, model, config, engine, runner, max_model_len, on_phase)
    return Loaded(
        hf_config=loaded.config,
        engine=engine,
        runner=runner,
        compiled=model.compiled,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        attention=model.attention,
        plan=plan,
        notes=(
            *loaded.notes,
            *(f"attention_backend: {reason}" for reason in model.attention.reasons if model.attention.is_fallback),
            *(f"cudagraph_mode: {reason}" for reason in plan.resolved.reasons),
            *model.layout.notes,
            *([f"weights were loaded before anything was compiled: {weights_first}"] if weights_first else ()),
            *static_sizes_note(config),
            *([str(checked)] if checked is not None else ()),
        ),
        selfcheck=checked,
    )


def _selfcheck(
    loaded: LoadedModel,
    model: CompiledLM,
    config: EngineConfig,
    engine: Engine,
    runner: ModelRunner,
    max_model_len: int,
    on_phase: OnPhase | None,
) -> SelfcheckReport:
    """Compare what will run with the model as it was traced. A failure leaves no graphs behind."""
    from piecegraph.runner.selfcheck import selfcheck

    try:
        return selfcheck(
            loaded.model,
            model.compiled,
            config.compile,
            runner=runner,
            engine=engine,
            max_model_len=max_model_len,
            needs_host_batch=model.attention.backend.needs_host_batch,
            on_phase=on_phase,
        )
    except BaseException:
        runner.close()
        model.compiled.close()
        raise


def _runner(
    model: CompiledLM,
    plan: GraphPlan,
    config: EngineConfig,
    sampler: Sampler,
    max_num_tokens: int,
    device: torch.device,
    on_phase: OnPhase | None,
) -> tuple[ModelRunner, int]:
    """The step over fixed buffers, its graphs captured, and the number of blocks its cache then has."""
    backend = model.attention.backend
    with timed_phase(on_phase, "buffers"):
        step = build_step(
            model.compiled,
            layers=model.layers,
            layout=model.layout,
            backend=backend,
            config=config,
            sampler=sampler,
            max_num_tokens=max_num_tokens,
            device=device,
        )
    cache = _allocate(model, config, step, max_num_tokens, on_phase)
    step = replace(step, kv_caches=cache.kv_caches)
    graphs = CudaGraphManager(
        step=step,
        compiled=model.compiled,
        max_model_len=sampler.max_model_len,
        needs_host_batch=backend.needs_host_batch,
        kind=config.graph_kind,
        strict=config.strict,
    )
    try:
        graphs.capture(full=plan.full, piecewise=plan.piecewise, max_bytes=cache.max_graph_bytes, on_phase=on_phase)
        num_blocks = _fill(cache, graphs.device_bytes, device, on_phase)
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
    runner = ModelRunner(
        step=step,
        graphs=graphs,
        dispatcher=dispatcher,
        needs_host_batch=backend.needs_host_batch,
        strict=config.strict,
    )
    return runner, num_blocks


def _allocate(
    model: CompiledLM, config: EngineConfig, step: ModelStep, max_num_tokens: int, on_phase: OnPhase | None
) -> CacheAllocation:
    """The cache's tensors: with all their memory if their size is given or there is no GPU, else with what the
    graphs can be captured over, to be filled after them."""
    started = time.monotonic()
    device, max_model_len = step.buffers.input_ids.device, step.sampler.max_model_len
    sizes = CacheSizes(
        block_size=config.block_size,
        block_bytes=bytes_per_block(model.layers, config.block_size, model.layout.tensors),
        blocks_per_request=model.layout.blocks_per_request(max_model_len, config.block_size, max_num_tokens),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )

    def allocate(num_blocks: int, *, empty: Callable[..., torch.Tensor] = torch.empty) -> dict[str, KVCache]:
        caches = allocate_kv_caches(
            model.layers, num_blocks, config.block_size, device, tensors=model.layout.tensors, empty=empty
        )
        return dict(as_pages(caches, config.block_size // step.block_size))

    has_graphs = model.plan.has_graphs
    if device.type == "cpu" or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        cache = allocate_given(
            allocate,
            sizes,
            device,
            num_kv_blocks=config.num_kv_blocks,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            has_graphs=has_graphs,
        )
    else:
        measure = functools.partial(
            measure_step,
            step,
            num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            needs_host_batch=model.attention.backend.needs_host_batch,
        )
        step_bytes = kept_or_measured(_kept_step(model, config, step, max_num_tokens), measure, on_phase)
        cache = allocate_on_gpu(
            allocate,
            sizes,
            device,
            gpu_memory_utilization=config.gpu_memory_utilization,
            step_bytes=step_bytes,
            has_graphs=has_graphs,
        )
    if on_phase is not None and not cache.is_growing:
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=str(cache)))
    return cache


def _kept_step(model: CompiledLM, config: EngineConfig, step: ModelStep, max_num_tokens: int) -> KeptStepMemory | None:
    """Where what the largest step takes is kept; None where nothing of the model is, or where attention is by packages
    of others, whose versions no key has."""
    key = model.compiled.report().cache.key
    if key is None or model.attention.backend.name != "triton":
        return None
    sizes = {
        "max_num_tokens": max_num_tokens,
        "max_model_len": step.sampler.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "block_size": step.block_size,
        "graphs": model.plan.has_graphs,
    }
    return KeptStepMemory(CompileCache.open(config.compile), key, step.buffers.input_ids.device, sizes)


def _fill(cache: CacheAllocation, graph_bytes: int, device: torch.device, on_phase: OnPhase | None) -> int:
    """The number of blocks, now that the graphs are there and nothing else will be allocated for good."""
    if not cache.is_growing:
        return cache.num_blocks
    started = time.monotonic()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # capture left nothing unused with torch
    num_blocks = cache.fill(total_bytes - free_bytes, graph_bytes)
    if on_phase is not None:
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=str(cache)))
    return num_blocks
