"""The start of an engine from its config, in order: load, compile, allocate the KV cache, capture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.paths import traffic_folder
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.select import check_backend_name
from piecegraph.runner.common.config_on_device import batched_tokens, static_sizes_note
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.logits_processor import LogitsProcessor, LogitsProcessorConfig
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.cudagraphs.capture_sizes import check_capture_sizes
from piecegraph.runner.cudagraphs.measured_times import why_not_measured
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.kv_cache.scales import scales_note, shift_note
from piecegraph.runner.late_start.fast_start import why_not_fast
from piecegraph.runner.lora.modules import adaptable_paths, check_targets
from piecegraph.runner.lora.store import AdapterStore
from piecegraph.runner.models.causal_lm import CausalLMForward
from piecegraph.runner.models.checkpoint.files import check_weight_files
from piecegraph.runner.models.config.dtype import resolve_dtype
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.config.tokenizer import load_tokenizer
from piecegraph.runner.models.cpu_kernels import choose_cpu_kernels, cpu_kernels_notes
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.generation_defaults import eos_token_ids, generation_config_of, sampling_defaults
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.speculative.heads.head_config import with_head
from piecegraph.runner.startup.compiling.compile_model import CompiledLM, compile_model
from piecegraph.runner.startup.compiling.decide import AllLayers
from piecegraph.runner.startup.drafts.draft import (
    CompiledDraft,
    check_draft,
    compile_draft,
)
from piecegraph.runner.startup.drafts.head import compile_head
from piecegraph.runner.startup.load_weights import ModelToLoad
from piecegraph.runner.startup.loaded import Loaded
from piecegraph.runner.startup.make_runner import MadeRunner, make_runner
from piecegraph.runner.startup.make_scheduler import engine_kind, make_scheduler, num_steps_ahead
from piecegraph.runner.startup.rank_device import device_of
from piecegraph.runner.startup.rank_runner import make_runner_of_rank
from piecegraph.runner.startup.scaled_runner import make_scaled_runner
from piecegraph.runner.state_layers.layer import library_notes
from piecegraph.runner.step.prompt_embeds import embedding_size, embeds_forward
from piecegraph.runner.tensor_parallel.parallel import Parallel
from piecegraph.runner.traffic.kept import Kept, add_to_kept, kept_key, read_kept
from piecegraph.runner.traffic.traffic_sizes import with_traffic_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.runner.inspect.selfcheck import SelfcheckReport


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
        device = device_of(config, parallel)
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
    _choose_kernels(config, hf_config, device, on_phase)
    of_model = ModelToLoad(config, hf_config, dtype, device, max_model_len, _stage(parallel), on_phase)
    load = functools.cache(functools.partial(of_model.with_weights, parallel))
    stand_in, weights_first = of_model.without_weights() if background is None else (None, "")
    embeds_size = _embeds_size(config, stand_in, load)
    args = (stand_in, load, config, max_model_len, max_num_tokens, on_phase, _all_layers(parallel))
    model = compile_model(*args, background=background)
    config, steps_ahead, loaded = model.config, num_steps_ahead(model.config, model, device), load()
    model, draft = compile_draft(draft_source, model, max_num_tokens, on_phase)
    model, draft = compile_head(head, model, draft, loaded, (max_model_len, max_num_tokens), on_phase)
    loaded, store = _with_store(config, loaded, model.compiled, parallel)
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    sampler = _sampler(config, max_model_len, vocab_size, device, on_phase)
    over_embeds = None if embeds_size is None else embeds_forward(loaded.model, loaded.first_position)
    make: Callable[..., MadeRunner] = functools.partial(
        make_runner, model, draft, config, sampler, max_num_tokens, over_embeds, device, on_phase, background, loaded
    )
    make = functools.partial(make_scaled_runner, loaded, model, config, sampler, make)
    if parallel is not None:
        make = functools.partial(make_runner_of_rank, parallel, loaded, model, config, make, on_phase)
    runner, num_blocks, start, mapped = make()
    with timed_phase(on_phase, "engine"):
        generation_config = generation_config_of(config.source, loaded.model)
        engine = engine_kind(config)(
            scheduler=make_scheduler(config, model, num_blocks, max_num_tokens, steps_ahead, store),
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


def _choose_kernels(
    config: EngineConfig, hf_config: PretrainedConfig, device: torch.device, on_phase: OnPhase | None
) -> None:
    """Load our C++ kernels on a CPU, a phase of its own."""
    if device.type == "cpu":
        with timed_phase(on_phase, "kernels"):
            choose_cpu_kernels(config.quantization, hf_config, device.type, config.compile)


def _tokenizer(config: EngineConfig, on_phase: OnPhase | None) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    with timed_phase(on_phase, "tokenizer"):
        return load_tokenizer(config.source, config.tokenizer)


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


def _with_store(
    config: EngineConfig, loaded: LoadedModel, compiled: CompiledModel, parallel: Parallel | None
) -> tuple[LoadedModel, AdapterStore | None]:
    """Return the model with only the adaptable modules whose weights the compiled pieces read, and its empty store.

    Model code may use a module's weight without calling the module; adapters for such a module are refused. With
    stages, the store checks adapters against the modules of all of them.
    """
    if loaded.adapted is None:
        return loaded, None
    assert config.max_cpu_loras is not None, "resolved in EngineConfig"
    adapted = loaded.adapted.only_read({id(tensor) for _, tensor in compiled.bound_tensors()})
    if parallel is not None and parallel.stage is not None:
        adapted = parallel.all_adapted(adapted)
        found = (*adapted.shapes, *adapted.unread)
        could = adaptable_paths(loaded.model)
        check_targets(type(loaded.model).__name__, adapted.options.target_modules, found, could)
    loaded = replace(loaded, adapted=loaded.adapted, notes=(*loaded.notes, *adapted.notes))
    return loaded, AdapterStore(adapted, capacity=config.max_cpu_loras, dtype=loaded.dtype, device=loaded.device)


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
        *scales_note(config),
        *shift_note(config, model.layers),
        *(f"attention_backend: {reason}" for reason in model.attention.reasons if model.attention.is_fallback),
        *cpu_kernels_notes(loaded.device.type),
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


def _stage(parallel: Parallel | None) -> Stage | None:
    """Return the stage of a pipeline that this process runs; None: there is one stage."""
    return None if parallel is None else parallel.stage


def _all_layers(parallel: Parallel | None) -> AllLayers | None:
    """Return the function that finds the layers of all stages of a pipeline; None: there is one stage."""
    return None if parallel is None or parallel.stage is None else parallel.all_layers
