"""The start of an engine from its config, in order: load, compile, allocate the KV cache, capture."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.errors import ConfigError
from piecegraph.passes.ops.collectives import running_in
from piecegraph.paths import traffic_folder
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.interface.cache_spec import CachedLayer
from piecegraph.runner.attention.interface.kv_cache import (
    LayerCache,
    allocate_kv_caches,
    allocate_pages,
    as_pages,
    bytes_per_block,
)
from piecegraph.runner.attention.select import BackendChoice, check_backend_name
from piecegraph.runner.common.engine_config import EngineConfig, batched_tokens, runs_ahead, static_sizes_note
from piecegraph.runner.common.logits_processor import LogitsProcessor, LogitsProcessorConfig
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.cudagraphs.capture_sizes import check_capture_sizes
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.cudagraphs.measured_times import why_not_measured
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver, MemoryDriver, unavailable_reason
from piecegraph.runner.device_memory.growing_memory import GrowingMemory
from piecegraph.runner.device_memory.mapped_weights import MappedWeights
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.kv_cache.allocation import CacheAllocation, CacheSizes, allocate_given, allocate_on_gpu
from piecegraph.runner.kv_cache.budget import graph_budget_bytes
from piecegraph.runner.late_start.fast_start import FastStart, why_not_fast
from piecegraph.runner.lora.modules import lora_options
from piecegraph.runner.lora.store import AdapterStore
from piecegraph.runner.models.causal_lm import CausalLMForward
from piecegraph.runner.models.checkpoint.files import check_weight_files
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.generation_defaults import eos_token_ids, generation_config_of, sampling_defaults
from piecegraph.runner.models.layer_rules import apply_layer_rules
from piecegraph.runner.models.length import model_length
from piecegraph.runner.models.load import (
    LoadedModel,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import stand_in_for
from piecegraph.runner.pipeline_parallel.pipeline_scheduler import PipelineScheduler
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.pipeline_parallel.stage_step import stage_step
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.lora_slots import LoraSlots
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.speculative.drafter import Drafter, slots_tensor
from piecegraph.runner.speculative.heads.head_config import with_head
from piecegraph.runner.speculative.heads.head_step import HeadedStep, headed_step
from piecegraph.runner.speculative.speculative_engine import SpeculativeEngine
from piecegraph.runner.speculative.speculative_runner import SpeculativeRunner
from piecegraph.runner.speculative.speculative_scheduler import SpeculativeScheduler
from piecegraph.runner.speculative.speculative_step import SpeculativeStep, speculative_step
from piecegraph.runner.startup.compile_model import CompiledLM, compile_model
from piecegraph.runner.startup.decide import AllLayers
from piecegraph.runner.startup.draft import (
    CompiledDraft,
    capture_drafter,
    check_draft,
    compile_draft,
    make_drafter,
)
from piecegraph.runner.startup.head import CompiledHead, compile_head, make_head_drafter
from piecegraph.runner.startup.profile import measure_step
from piecegraph.runner.startup.rank_device import rank_device
from piecegraph.runner.state_layers.layer import library_notes
from piecegraph.runner.step.model_step import ModelStep, build_step
from piecegraph.runner.step.prompt_embeds import EmbedsForward, embedding_size, embeds_forward
from piecegraph.runner.tensor_parallel.expert_ranks import expert_ranks
from piecegraph.runner.tensor_parallel.parallel import Parallel, graph_facts, rank_facts
from piecegraph.runner.tensor_parallel.plan import check_heads
from piecegraph.runner.traffic.kept import Kept, add_to_kept, kept_key, read_kept
from piecegraph.runner.traffic.traffic_sizes import with_traffic_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.runner.inspect.selfcheck import SelfcheckReport


class Mapped(NamedTuple):
    """The memory of an engine on a GPU that sleeps: it is unmapped, and mapped again at the same addresses."""

    weights: MappedWeights
    cache: GrowingMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A running engine and everything else that an `LLM` holds."""

    source: ModelSource
    kept: Kept  # what was known of the model's traffic when the start ended: its measured times
    model: LoadedModel
    seed: int  # for random weights
    hf_config: PretrainedConfig
    engine: Engine
    runner: ModelRunner
    compiled: CompiledModel
    draft: CompiledDraft | None  # the model that drafts, if there is one
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    sampling_defaults: Mapping[str, Any]  # the fields of SamplingParams that the generation config sets
    attention: BackendChoice
    plan: GraphPlan
    notes: tuple[str, ...]
    selfcheck: SelfcheckReport | None  # None: not requested
    start: FastStart | None  # what remains of the start; None: nothing does
    mapped: Mapped | None  # memory that a sleep unmaps; None: torch has allocated it

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device that steps run on."""
        return self.model.device

    @property
    def max_num_seqs(self) -> int:
        """The largest number of requests that run at once."""
        return self.runner.step.buffers.max_num_reqs

    def keep_traffic(self) -> None:
        """Add the shapes of all steps to those in the cache directory, with the times that were measured.

        To be called once, when the engine ends. Nothing is written if there were no steps.
        """
        counters, times = self.runner.counters, self.runner.graphs.times
        decode, mixed = (counters.shapes(is_decode=is_decode) for is_decode in (True, False))
        if decode or mixed or times != self.kept.times:
            add_to_kept(traffic_folder(), replace(self.kept, decode=decode, mixed=mixed, times=times))


class MadeRunner(NamedTuple):
    """A runner and what belongs to it."""

    runner: ModelRunner
    num_blocks: int  # of the KV cache
    start: FastStart | None  # what remains of the start
    mapped: Mapped | None  # see `Loaded.mapped`


MakeRunner = Callable[..., MadeRunner]


def load_engine(config: EngineConfig, on_phase: OnPhase | None, parallel: Parallel | None = None) -> Loaded:
    """Load and compile the model, allocate its KV cache, and capture its graphs; refuse early what cannot work.

    With `config.start` "fast", pieces compile and graphs are captured later (`Loaded.start`). `parallel`: how this
    process takes part in an engine with several ranks, which all call this at the same time.
    """
    check_backend_name(config.attention_backend)
    background = BackgroundCompile() if config.start == "fast" and not why_not_fast(config) else None
    try:
        loaded = _load(config, on_phase, parallel, background)
    except BaseException:
        if background is not None:
            background.close()
        raise
    if loaded.start is not None:
        loaded.engine.call_between_steps(loaded.start.between_steps)
    return loaded


def _load(
    config: EngineConfig, on_phase: OnPhase | None, parallel: Parallel | None, background: BackgroundCompile | None
) -> Loaded:
    """Load an engine; `background` compiles the pieces of a fast start."""
    with timed_phase(on_phase, "device"):  # torch creates the context of a GPU here
        device = _device(config, parallel)
    max_num_tokens = _max_num_tokens(config, device)
    with timed_phase(on_phase, "config"):
        hf_config = load_config(config.source)
        if getattr(hf_config, "quantization_config", None) is not None:
            config.check_beside_quantised("a quantised checkpoint")
        dtype = resolve_dtype(config.dtype, hf_config, device, config.quantization)
        max_model_len = model_length(hf_config, config.max_model_len, first_position(config.source, hf_config).value)
        key = kept_key(hf_config, dtype, device)
        config, sizes_note = with_traffic_sizes(config, read_kept(traffic_folder(), key), max_num_tokens)
    tokenizer = _tokenizer(config, on_phase)
    check_weight_files(config.source)
    config, head = with_head(config, hf_config)
    draft_source = check_draft(config, hf_config, tokenizer, dtype, device, max_model_len, max_num_tokens)
    stage = None if parallel is None else parallel.stage
    of_model = (config, hf_config, dtype, device, max_model_len, stage, on_phase)
    load = functools.cache(functools.partial(_load_weights, *of_model, parallel=parallel))
    stand_in, weights_first = _stand_in(*of_model) if background is None else (None, "")
    embeds_size = _embeds_size(config, stand_in, load)
    args = (stand_in, load, config, max_model_len, max_num_tokens, on_phase, _all_layers(parallel))
    model = compile_model(*args, background=background)
    config = model.config
    steps_ahead, loaded = _steps_ahead(config, model, device), load()
    model, draft = compile_draft(draft_source, model, max_num_tokens, on_phase)
    model, draft = compile_head(head, model, draft, loaded, (max_model_len, max_num_tokens), on_phase)
    loaded, store = _with_store(config, loaded, model.compiled)
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    sampler = _sampler(config, max_model_len, vocab_size, device, on_phase)
    over_embeds = None if embeds_size is None else embeds_forward(loaded.model, loaded.first_position)
    make_runner: MakeRunner = functools.partial(
        _runner, model, draft, config, sampler, max_num_tokens, over_embeds, device, on_phase, background, loaded
    )
    if parallel is not None:
        make_runner = functools.partial(_runner_of_rank, parallel, loaded, model, config, make_runner, on_phase)
    runner, num_blocks, start, mapped = make_runner()
    with timed_phase(on_phase, "engine"):
        generation_config = generation_config_of(config.source, loaded.model)
        engine = _engine_kind(config)(
            scheduler=_scheduler(config, model, num_blocks, max_num_tokens, steps_ahead, store),
            runner=runner,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids(generation_config, loaded.model, tokenizer),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            seed=config.seed,
            steps_ahead=steps_ahead,
            embedding_size=embeds_size,
            max_logprobs=config.max_logprobs,
            logits_processors=config.logits_processors,
            adapters=store,
        )
    checked = _selfcheck(loaded, model, config, engine, runner, max_model_len, on_phase)
    if config.logits_processors:
        sampler.use_logits_processors(_logits_processors(config, loaded, max_model_len, max_num_tokens, vocab_size))
    return Loaded(
        source=config.source,
        kept=_keep_times(key, config, device, runner),
        model=loaded,
        seed=config.seed,
        hf_config=loaded.config,
        engine=engine,
        runner=runner,
        compiled=model.compiled,
        draft=draft,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        sampling_defaults=sampling_defaults(generation_config),
        attention=model.attention,
        plan=model.plan,
        notes=sizes_note
        + _notes(config, loaded, model, draft, weights_first or model.compiled.report().weights_first, checked),
        selfcheck=checked,
        start=start,
        mapped=mapped,
    )


def _keep_times(key: str, config: EngineConfig, device: torch.device, runner: ModelRunner) -> Kept:
    """Keep the times of graphs in the cache directory if they were measured, and return what identifies the model."""
    kept = Kept(
        key=key,
        model=Path(config.source.model).name,
        device=device.type,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=batched_tokens(config, device.type),
        times=runner.graphs.times,
    )
    if kept.times.graphs:
        add_to_kept(traffic_folder(), kept)
    return kept


def _tokenizer(config: EngineConfig, on_phase: OnPhase | None) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    with timed_phase(on_phase, "tokenizer"):
        return load_tokenizer(config.source, config.tokenizer)


def _stand_in(
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    stage: Stage | None,
    on_phase: OnPhase | None,
) -> tuple[LoadedModel | None, str]:
    """Return what `stand_in_for` returns, or no model where nothing is compiled while weights are loaded."""
    if config.compile.compiler == "eager":
        return None, ""
    with timed_phase(on_phase, "model"):
        return stand_in_for(
            config.source,
            hf_config,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            num_ranks=config.tensor_parallel_size,
            stage=stage,
            experts=expert_ranks(config),
            quantization=config.quantization,
            lora=lora_options(config),
        )


def _load_weights(
    config: EngineConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    stage: Stage | None,
    on_phase: OnPhase | None,
    *,
    parallel: Parallel | None,
) -> LoadedModel:
    """Return the model with its weights, and report its notes as phases."""
    rank = 0 if parallel is None else parallel.group.rank
    engine = 0 if parallel is None or parallel.peers is None else parallel.peers.engine
    loaded = load_model(
        config.source,
        hf_config,
        dtype=dtype,
        device=device,
        seed=config.seed,
        on_phase=on_phase,
        rank=rank,
        num_ranks=config.tensor_parallel_size,
        stage=stage,
        experts=expert_ranks(config, engine),
        quantization=config.quantization,
        lora=lora_options(config),
    )
    rules = apply_layer_rules(loaded.model, max_model_len)
    loaded = replace(loaded, notes=(*loaded.notes, *fix_longrope(loaded.model, max_model_len), *rules))
    for note in loaded.notes:
        if on_phase is not None:
            on_phase(Phase(name="load", detail=note))
    return loaded


def _embeds_size(config: EngineConfig, stand_in: LoadedModel | None, load: Callable[[], LoadedModel]) -> int | None:
    """Return the row size of prompt embeddings, or None if they are not enabled."""
    if not config.enable_prompt_embeds:
        return None
    return embedding_size((stand_in if stand_in is not None else load()).model)


def _sampler(
    config: EngineConfig, max_model_len: int, vocab_size: int, device: torch.device, on_phase: OnPhase | None
) -> Sampler:
    with timed_phase(on_phase, "buffers"):
        return Sampler(
            max_num_reqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            device=device,
            logprobs_mode=LogprobsMode.parse(config.logprobs_mode),
        )


def _engine_kind(config: EngineConfig) -> Callable[..., Engine]:
    if config.speculative is None:
        return Engine
    speculative = config.speculative
    return functools.partial(
        SpeculativeEngine, max_drafts=speculative.num_speculative_tokens, is_synthetic=speculative.is_synthetic
    )


def _steps_ahead(config: EngineConfig, model: CompiledLM, device: torch.device) -> int:
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


def _scheduler(
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
            max_num_batched_tokens=_span(config, max_num_tokens),
            groups=model.layout.groups,
            enable_prefix_caching=config.enable_prefix_caching is not False,
            cached_states=config.cached_states,
        ),
        lora_slots=None if store is None else LoraSlots(config.max_loras, store.pinned_digests),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        policy=SchedulingPolicy.PRIORITY,  # first come, first served among equal priorities, which is the default
    )


def _with_store(
    config: EngineConfig, loaded: LoadedModel, compiled: CompiledModel
) -> tuple[LoadedModel, AdapterStore | None]:
    """Return the model with those modules only whose adapters its compiled pieces read, and an empty store for it.

    The code of a model may use a module's weight without calling the module. Adapters for it are refused by name.
    """
    if loaded.adapted is None:
        return loaded, None
    assert config.max_cpu_loras is not None, "resolved in EngineConfig"
    adapted = loaded.adapted.only_read({id(tensor) for _, tensor in compiled.bound_tensors()})
    loaded = replace(loaded, adapted=loaded.adapted, notes=(*loaded.notes, *adapted.notes))
    return loaded, AdapterStore(adapted, capacity=config.max_cpu_loras, dtype=loaded.dtype, device=loaded.device)


def _map_weights(
    config: EngineConfig, loaded: LoadedModel, compiled: CompiledModel, on_phase: OnPhase | None
) -> MappedWeights | None:
    """Move the weights into memory that can be unmapped, before anything is captured; None: nothing needs that.

    Raises `ConfigError` for what cannot sleep on a GPU.
    """
    if not config.enable_sleep_mode or loaded.device.type == "cpu":
        return None
    reason = unavailable_reason(loaded.device)
    for is_so, what in (
        (bool(reason), f"{loaded.device}, because {reason}"),
        (config.speculative is not None, "speculative_config on a GPU"),
        (config.enable_lora, "enable_lora on a GPU"),
    ):
        if is_so:
            raise ConfigError(f"enable_sleep_mode=True is not yet available with {what}; leave it out.")
    with timed_phase(on_phase, "sleep mode"):
        return mapped_weights(loaded.model, compiled, CudaMemoryDriver(loaded.device))


def mapped_weights(module: torch.nn.Module, compiled: CompiledModel, driver: MemoryDriver) -> MappedWeights:
    """Move everything that `module` and the pieces compiled from it hold into memory of `driver`. Raises `OutOfMemory`.

    No graph may have been captured.
    """
    weights = MappedWeights(driver)
    reloaded = {tensor.untyped_storage().data_ptr() for tensor in restorable(module)}
    own = [*module.parameters(), *module.buffers()]
    compiled.move_weights(lambda bound: weights.move([*own, *bound], reloaded))
    return weights


def _span(config: EngineConfig, max_num_tokens: int) -> int:
    """Return the most tokens that a request's computed tokens may change in a step.

    A window's blocks are kept until drafts are verified, those of a step ahead included, and a draft model's slots are
    taken before.
    """
    return max_num_tokens + (3 * config.speculative.num_speculative_tokens if config.speculative else 0)


def _notes(
    config: EngineConfig,
    loaded: LoadedModel,
    model: CompiledLM,
    draft: CompiledDraft | None,
    weights_first: str,
    checked: SelfcheckReport | None,
) -> tuple[str, ...]:
    """Return the decisions that a caller may want to know about.

    `weights_first`: the reason why weights were loaded before anything was compiled, or "".
    """
    return (
        *loaded.notes,
        *(f"attention_backend: {reason}" for reason in model.attention.reasons if model.attention.is_fallback),
        *(f"cudagraph_mode: {reason}" for reason in model.plan.resolved.reasons),
        *model.layout.notes,
        *(library_notes(model.state_layers) if loaded.device.type == "cuda" else ()),
        *(draft.notes if draft is not None else ()),
        *([f"weights were loaded before anything was compiled: {weights_first}"] if weights_first else ()),
        *static_sizes_note(config),
        *([reason] if config.start == "fast" and (reason := why_not_fast(config)) else ()),
        *([reason] if config.measure_graphs and (reason := why_not_measured(config)) else ()),
        *([str(checked)] if checked is not None else ()),
    )


def _logits_processors(
    config: EngineConfig, loaded: LoadedModel, max_model_len: int, max_num_tokens: int, vocab_size: int
) -> list[LogitsProcessor]:
    """Construct one processor of each given class. Raises what a constructor raises."""
    processor_config = LogitsProcessorConfig(
        model_config=LogitsProcessorConfig.Model(
            hf_config=loaded.config, max_model_len=max_model_len, vocab_size=vocab_size
        ),
        scheduler_config=LogitsProcessorConfig.Scheduler(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=max_num_tokens
        ),
    )
    is_cuda = loaded.device.type == "cuda"
    return [kind(processor_config, loaded.device, is_cuda) for kind in config.logits_processors]


def _selfcheck(
    loaded: LoadedModel,
    model: CompiledLM,
    config: EngineConfig,
    engine: Engine,
    runner: ModelRunner,
    max_model_len: int,
    on_phase: OnPhase | None,
) -> SelfcheckReport | None:
    """Compare the compiled model with the traced one, if that was asked for. After a failure the graphs are closed."""
    if not config.compile.selfcheck:
        return None
    from piecegraph.runner.inspect.selfcheck import selfcheck

    try:
        return selfcheck(
            CausalLMForward(loaded.model, loaded.first_position),
            model.compiled,
            config.compile,
            runner=runner,
            engine=engine,
            max_model_len=max_model_len,
            needs_host_batch=model.needs_host_batch,
            on_phase=on_phase,
        )
    except BaseException:
        runner.close()
        model.compiled.close()
        raise


def _max_num_tokens(config: EngineConfig, device: torch.device) -> int:
    """Return the largest number of tokens of a step. Raises `ConfigError` for capture sizes that do not fit it."""
    max_num_tokens = batched_tokens(config, device.type)
    if config.cudagraph_capture_sizes is not None:
        check_capture_sizes(config.cudagraph_capture_sizes, max_num_tokens)
    return max_num_tokens


def _all_layers(parallel: Parallel | None) -> AllLayers | None:
    """Return the function that finds the layers of all stages of a pipeline; None: there is one stage."""
    return None if parallel is None or parallel.stage is None else parallel.all_layers


def _device(config: EngineConfig, parallel: Parallel | None) -> torch.device:
    """Return the device of this process. Raises `ConfigError`."""
    if parallel is None:
        return resolve_device(config.device)
    device = rank_device(config.device, parallel.group)
    if parallel.stage is not None and device.type != "cpu":
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} is not yet available on {device.type}; give "
            "device='cpu', or leave it out."
        )
    return device


def _runner_of_rank(
    parallel: Parallel,
    loaded: LoadedModel,
    model: CompiledLM,
    config: EngineConfig,
    make_runner: MakeRunner,
    on_phase: OnPhase | None,
) -> MadeRunner:
    """Return what `make_runner`, `_runner` with its arguments, returns, once all ranks have proved to be alike."""
    group, everyone = parallel.group, parallel.everyone
    check_heads(loaded.rank_plan, [(layer.name, layer.num_q_heads, layer.num_kv_heads) for layer in model.layers])
    facts = rank_facts(config.source.weight_files, config=str(loaded.config.to_json_string()))
    facts["dtype (with dtype='auto' each machine's processor decides)"] = str(loaded.dtype)
    with timed_phase(on_phase, "ranks"):
        everyone.agree("facts", facts)
        if group.engines is not None:
            group.engines.agree("facts", facts)
        group.agree("graph", graph_facts(model.compiled.source))
        group.connect(loaded.device)
        parallel.connect_others()
        read = everyone.exchange("bytes read", json.dumps(loaded.bytes_read))
    if on_phase is not None:
        on_phase(Phase(name="ranks", detail=_bytes_read(read)))
        if group.sums_note:
            on_phase(Phase(name="ranks", detail=group.sums_note))
    plan = loaded.stage
    staged = None if plan is None else functools.partial(stage_step, plan=plan, dtype=loaded.dtype)
    with running_in(group):
        made: MadeRunner = make_runner(staged, parallel.runner_kind)
    return made._replace(num_blocks=everyone.smallest("num_blocks", made.num_blocks))


def _bytes_read(read: Sequence[str]) -> str:
    """Return what each rank has read of the weights, from JSON by rank: null where it is not known."""
    sizes = [None if text == "null" else f"{int(text) / 2**20:.1f} MiB" for text in read]
    return "weights read: " + ", ".join(f"rank {rank} {size or 'all'}" for rank, size in enumerate(sizes))


def _runner(
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
    weights = _map_weights(config, loaded, model.compiled, on_phase)
    cache = _allocate(model, draft, config, step, max_num_tokens, on_phase)
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
        _fill(cache, graph_bytes, set_aside, device, on_phase)
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


def _allocate(
    model: CompiledLM,
    draft: CompiledDraft | None,
    config: EngineConfig,
    step: ModelStep,
    max_num_tokens: int,
    on_phase: OnPhase | None,
) -> CacheAllocation:
    """Allocate the KV cache.

    All of its memory is allocated if its size is given or there is no GPU; otherwise only as much as capture needs,
    and the rest after the graphs are captured.
    """
    started = time.monotonic()
    of_draft = () if draft is None else draft.cached_layers
    layers: tuple[CachedLayer, ...] = (*model.layers, *model.state_layers, *of_draft)
    layout = model.layout
    device, max_model_len = step.buffers.input_ids.device, step.sampler.max_model_len
    sizes = CacheSizes(
        block_size=config.block_size,
        block_bytes=bytes_per_block(layers, config.block_size, layout.tensors, layout.page_bytes, layout.beside),
        blocks_per_request=layout.blocks_per_request(max_model_len, config.block_size, _span(config, max_num_tokens)),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )

    def allocate(num_blocks: int, *, empty: Callable[..., torch.Tensor] = torch.empty) -> Mapping[str, LayerCache]:
        if layout.page_bytes is not None:
            in_pages = allocate_pages(
                layers,
                num_blocks,
                config.block_size,
                device,
                tensors=layout.tensors,
                page_bytes=layout.page_bytes,
                kernel_block_size=step.block_size,
                empty=empty,
            )
            caches = allocate_kv_caches(of_draft, num_blocks, config.block_size, device, empty=empty)
            return {**in_pages, **as_pages(caches, config.block_size // step.block_size)}
        caches = allocate_kv_caches(
            (*model.layers, *of_draft), num_blocks, config.block_size, device, tensors=layout.tensors, empty=empty
        )
        return as_pages(caches, config.block_size // step.block_size)

    has_graphs = model.plan.has_graphs
    if device.type == "cpu" or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        cache = allocate_given(
            allocate,
            sizes,
            device,
            num_kv_blocks=config.num_kv_blocks,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            has_graphs=has_graphs,
            driver=CudaMemoryDriver(device) if config.enable_sleep_mode and device.type == "cuda" else None,
        )
    else:
        with timed_phase(on_phase, "profile"):
            step_bytes = measure_step(
                step,
                num_tokens=max_num_tokens,
                max_model_len=max_model_len,
                needs_host_batch=model.needs_host_batch,
            )
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


def _fill(
    cache: CacheAllocation, graph_bytes: int, set_aside: int, device: torch.device, on_phase: OnPhase | None
) -> None:
    """Allocate the rest of a growing cache after capture.

    `set_aside`: bytes that are left free for graphs which are captured later.
    """
    if not cache.is_growing:
        return
    started = time.monotonic()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # torch caches no unused memory after capture
    cache.fill(total_bytes - free_bytes + set_aside, graph_bytes + set_aside)
    if on_phase is not None:
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=str(cache)))
