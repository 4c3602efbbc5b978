"""From a config to a pooling engine that answers: loading, compilation and capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.varlen.sdpa import SdpaVarlen
from piecegraph.runner.attention.varlen.transformers_varlen import register_varlen_attention
from piecegraph.runner.common.config_on_device import batched_tokens, static_sizes, static_sizes_note
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.capture_sizes import check_capture_sizes
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, plan_graphs
from piecegraph.runner.models.checkpoint.files import check_weight_files
from piecegraph.runner.models.config.device import resolve_device
from piecegraph.runner.models.config.dtype import resolve_dtype
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.config.tokenizer import load_tokenizer
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.pooling.engine import OutputRules, PoolingEngine
from piecegraph.runner.pooling.head import ClassifierHead, classifier_activation, num_labels
from piecegraph.runner.pooling.model import (
    DYNAMIC_DIMS,
    KINDS,
    PoolingModel,
    check_calls,
    example_inputs,
    load_pooling_model,
)
from piecegraph.runner.pooling.modules import SentenceModules, sentence_modules
from piecegraph.runner.pooling.pool import PoolingType
from piecegraph.runner.pooling.runner import PoolingRunner, capture_runner
from piecegraph.runner.pooling.step import PoolingBuffers, PoolingStep
from piecegraph.runner.pooling.task import PoolingTask

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPooler:
    """A pooling engine and everything else that an `LLM` holds."""

    hf_config: PretrainedConfig
    engine: PoolingEngine
    runner: PoolingRunner
    compiled: CompiledModel
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    task: PoolingTask
    do_lower_case: bool  # texts, before they are tokenized
    notes: tuple[str, ...]


def load_pooler(config: EngineConfig, task: PoolingTask, on_phase: OnPhase | None) -> LoadedPooler:
    """Load and compile the model, and capture its graphs. What cannot work is refused as early as it is known."""
    _refuse_generation_options(config)
    register_varlen_attention()
    with timed_phase(on_phase, "device"):
        device = resolve_device(config.device)
    with timed_phase(on_phase, "config"):
        hf_config = load_config(config.source)
        dtype = resolve_dtype(config.dtype, hf_config, device)
        modules = sentence_modules(config.source) if task is PoolingTask.EMBED else None
        max_model_len = _max_model_len(config, hf_config, task, modules)
        max_num_tokens = _max_num_tokens(config, device.type, max_model_len)
    if config.cudagraph_capture_sizes is not None:
        check_capture_sizes(config.cudagraph_capture_sizes, max_num_tokens)
    tokenizer = None
    if not config.skip_tokenizer_init:
        with timed_phase(on_phase, "tokenizer"):
            tokenizer = load_tokenizer(config.source, config.tokenizer)
    check_weight_files(config.source)
    model = load_pooling_model(
        config.source, hf_config, task, dtype=dtype, device=device, seed=config.seed, on_phase=on_phase
    )
    for note in model.loaded.notes:
        if on_phase is not None:
            on_phase(Phase(name="load", detail=note))
    after = _after_hidden_states(model, task, modules, hf_config, device)
    compiled = _compile(model, config, device, on_phase)
    buffers = PoolingBuffers(
        max_num_tokens=max_num_tokens,
        max_num_reqs=min(config.max_num_seqs, max_num_tokens),
        device=device,
        uncounted_token=model.loaded.uncounted_token,
    )
    step = PoolingStep(
        compiled=compiled, attention=SdpaVarlen(), pooling=after.pooling, head=after.head, buffers=buffers
    )
    try:
        runner = capture_runner(
            step,
            _plan(config, device, max_num_tokens),
            max_model_len=max_model_len,
            graph_kind=config.graph_kind,
            strict=config.strict,
            on_phase=on_phase,
        )
    except BaseException:
        compiled.close()
        raise
    return LoadedPooler(
        hf_config=hf_config,
        engine=PoolingEngine(
            runner=runner,
            rules=after.rules,
            max_model_len=max_model_len,
            max_num_seqs=buffers.max_num_reqs,
            max_num_batched_tokens=max_num_tokens,
            vocab_size=hf_config.get_text_config().vocab_size,
            num_token_types=int(hf_config.type_vocab_size) if model.takes_token_types else 0,
        ),
        runner=runner,
        compiled=compiled,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        task=task,
        do_lower_case=modules is not None and modules.do_lower_case,
        notes=(
            *model.loaded.notes,
            f"pooling: {', '.join(kind.value for kind in after.pooling)}",
            *(f"cudagraph_mode: {reason}" for reason in runner.plan.resolved.reasons),
            *static_sizes_note(config),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _AfterHiddenStates:
    """What becomes of a text's hidden states."""

    pooling: tuple[PoolingType, ...]
    head: nn.Module | None
    rules: OutputRules


def _refuse_generation_options(config: EngineConfig) -> None:
    """Raise `ConfigError` for an option that only generation has, rather than ignore it."""
    for name, value, default in (
        ("enable_prompt_embeds", config.enable_prompt_embeds, False),
        ("logits_processors", config.logits_processors, ()),
        ("speculative_config", config.speculative, None),
        ("num_kv_blocks", config.num_kv_blocks, None),
        ("cached_states", config.cached_states, None),
        ("kv_cache_memory_bytes", config.kv_cache_memory_bytes, None),
        ("kv_cache_dtype", config.kv_cache_dtype, "auto"),
        ("selfcheck", config.compile.selfcheck, False),
    ):
        if value != default:
            raise ConfigError(
                f"{name}={value!r} is for generation, and this model pools: it has no key/value cache and draws no "
                "tokens. Leave it out, or give runner='generate'."
            )
    if config.attention_backend not in ("auto", "sdpa"):
        raise ConfigError(
            f"attention_backend={config.attention_backend!r} attends over a key/value cache, which a model that pools "
            "has not; use 'auto' or 'sdpa'."
        )
    if config.source.is_gguf:
        raise UnsupportedModel("a GGUF file cannot be pooled here; use the model's safetensors.")


def _max_model_len(
    config: EngineConfig, hf_config: PretrainedConfig, task: PoolingTask, modules: SentenceModules | None
) -> int:
    """Return the largest number of tokens of a text: by default that of sentence-transformers, within the positions."""
    kind = KINDS[task]
    first = first_position(config.source, hf_config, auto_class=kind.auto_class, attention=kind.attention).value
    limit = model_length(hf_config, config.max_model_len, first)
    if config.max_model_len is None and modules is not None and modules.max_seq_length is not None:
        return min(limit, modules.max_seq_length)
    return limit


def _max_num_tokens(config: EngineConfig, device_type: str, max_model_len: int) -> int:
    """Return the largest number of tokens of a step, which computes whole texts. Raises `ConfigError`."""
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is less than max_model_len={max_model_len}, and a "
            "text is pooled in one step. Raise the first, or lower the second."
        )
    return max(batched_tokens(config, device_type), max_model_len)


def _after_hidden_states(
    model: PoolingModel,
    task: PoolingTask,
    modules: SentenceModules | None,
    hf_config: PretrainedConfig,
    device: torch.device,
) -> _AfterHiddenStates:
    """Return the pooling, what follows it and the rules of outputs.

    For embeddings without modules of sentence-transformers, the pooling is the last token's row of a model that looks
    back, and the first token's of an encoder [vLLM's choice].
    """
    if task is PoolingTask.CLASSIFY:
        classifier = ClassifierHead(model.loaded.model)
        activation, labels = classifier_activation(hf_config), num_labels(hf_config)
        rules = OutputRules(task=task, size=labels, normalize=False, matryoshka=None, activation=activation)
        return _AfterHiddenStates(pooling=(classifier.pooling,), head=classifier, rules=rules)
    size = int(hf_config.get_text_config().hidden_size)
    pooling: tuple[PoolingType, ...] = (PoolingType.CLS if model.is_encoder else PoolingType.LAST,)
    head, normalize = None, True
    if modules is not None:
        pooling, normalize = modules.pooling, modules.normalize
        size = _size_after(modules, size)
        head = nn.Sequential(*modules.dense).to(device) if modules.dense else None
    matryoshka = _matryoshka(hf_config)
    rules = OutputRules(task=task, size=size, normalize=normalize, matryoshka=matryoshka, activation=None)
    return _AfterHiddenStates(pooling=pooling, head=head, rules=rules)


def _size_after(modules: SentenceModules, hidden_size: int) -> int:
    """Return the size of an embedding. Raises `ConfigError` for a Dense module that takes another size than it gets."""
    size = hidden_size * len(modules.pooling)
    for dense in modules.dense:
        linear: Any = dense[0]  # type: ignore[index]  # a Sequential
        if linear.in_features != size:
            raise ConfigError(
                f"a Dense module takes {linear.in_features} features, but what comes before it gives {size}. Check "
                "modules.json and the modules' config.json."
            )
        size = linear.out_features
    return size


def _compile(
    model: PoolingModel, config: EngineConfig, device: torch.device, on_phase: OnPhase | None
) -> CompiledModel:
    def check(calls: tuple[SplitCall, ...]) -> None:
        check_calls(calls, model.loaded.config)

    with torch.no_grad():
        return compile_module(
            model.forward_module(),
            replace(config.compile, compile_sizes=static_sizes(config, is_cuda=device.type == "cuda")),
            dynamic_dims=DYNAMIC_DIMS,
            example_inputs=example_inputs(device),
            on_phase=on_phase,
            before_compile=check,
        )


def _plan(config: EngineConfig, device: torch.device, max_num_tokens: int) -> GraphPlan:
    """Return the graphs to capture: every batch is what generation calls a mixed one."""
    return plan_graphs(
        mode=config.cudagraph_mode.mixed_mode,  # type: ignore[union-attr]  # parsed by the config
        capture_sizes=config.cudagraph_capture_sizes,
        backend=_NoFullGraphs(),  # type: ignore[arg-type]  # of which only these two are read
        device=device,
        graph_kind=config.graph_kind,
        can_split=True,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        strict=config.strict,
    )


@dataclass(frozen=True, slots=True)
class _NoFullGraphs:
    """The attention of pooling, as the plan of graphs asks for it."""

    name: str = "sdpa"
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER  # its calls depend on the lengths of texts


def _matryoshka(config: PretrainedConfig) -> tuple[int, ...] | None:
    """Return the dimensions that a config allows; (): any; None: only all of them [vLLM's fields]."""
    allowed: Sequence[int] | None = getattr(config, "matryoshka_dimensions", None)
    if allowed:
        return tuple(sorted(allowed))
    return () if getattr(config, "is_matryoshka", False) else None
