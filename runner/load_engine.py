"""From a config to an engine that answers: load, compile, cache. The lifecycle, in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.plan import SplitCall
from piecegraph.errors import UnsupportedModel
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.backend import AttentionBackend
from piecegraph.runner.attention.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.select import select_backend
from piecegraph.runner.block_pool import BlockPool, blocks_for
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.engine import Engine
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.kv_cache import KVCache, allocate_kv_caches, bytes_per_block
from piecegraph.runner.memory import cpu_budget_bytes, gpu_budget_bytes, pick_num_blocks
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
from piecegraph.runner.model_support import check_layers
from piecegraph.runner.profile import peak_activation_bytes
from piecegraph.runner.rope import fix_longrope
from piecegraph.runner.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything an `LLM` holds."""

    engine: Engine
    compiled: CompiledModel
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    notes: tuple[str, ...]


def load_engine(config: EngineConfig, on_phase: OnPhase | None = None) -> Loaded:
    """Load the model, compile it, give it a cache. What cannot work is refused before compiling."""
    backend = select_backend(config.attention_backend)
    device = resolve_device(config.device)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    max_model_len = model_length(hf_config, config.max_model_len)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.source, config.tokenizer)
    loaded = load_model(config.source, hf_config, dtype=dtype, device=device, seed=config.seed, on_phase=on_phase)
    notes = [*loaded.notes, *fix_longrope(loaded.model, max_model_len)]
    for note in notes:
        if on_phase is not None:
            on_phase(Phase(name="load", detail=note))
    compiled, layers = _compile(loaded, backend, config, on_phase)
    max_num_batched_tokens = config.max_num_batched_tokens or (2048 if device.type == "cpu" else 8192)
    num_blocks, kv_caches = _allocate(
        compiled, layers, backend, config, device, max_model_len, max_num_batched_tokens, on_phase
    )
    engine = Engine(
        scheduler=Scheduler(
            pool=BlockPool(num_blocks),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        runner=ModelRunner(
            forward=compiled,
            impl=backend.impl(),
            metadata_builder=backend.metadata_builder(layers, config.block_size, device),
            kv_caches=kv_caches,
            block_size=config.block_size,
            device=device,
        ),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(loaded.model),
        max_model_len=max_model_len,
        vocab_size=loaded.config.get_text_config(decoder=True).vocab_size,
        seed=config.seed,
    )
    return Loaded(
        engine=engine, compiled=compiled, tokenizer=tokenizer, max_model_len=max_model_len, notes=tuple(notes)
    )


def _compile(
    loaded: LoadedModel, backend: AttentionBackend, config: EngineConfig, on_phase: OnPhase | None
) -> tuple[CompiledModel, tuple[AttentionLayer, ...]]:
    """The compiled model, and the attention layers found in its graph."""
    found: list[AttentionLayer] = []

    def check(calls: tuple[SplitCall, ...]) -> None:
        found.extend(attention_layers(calls))
        check_layers(found, loaded.config)
        reason = backend.unsupported_reason(found, loaded.device)
        if reason is not None:
            raise UnsupportedModel(f"attention backend {backend.name!r}: {reason}")

    with torch.no_grad():
        compiled = compile_module(
            CausalLMForward(loaded.model),
            config.compile,
            dynamic_dims=DYNAMIC_DIMS,
            example_inputs=example_inputs(loaded.device),
            on_phase=on_phase,
            before_compile=check,
        )
    return compiled, tuple(found)


def _allocate(
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    layers: tuple[AttentionLayer, ...],
    backend: AttentionBackend,
    config: EngineConfig,
    device: torch.device,
    max_model_len: int,
    max_num_batched_tokens: int,
    on_phase: OnPhase | None,
) -> tuple[int, dict[str, KVCache]]:
    """The number of blocks, and the caches."""
    started = time.monotonic()
    block_bytes = bytes_per_block(layers, config.block_size)
    if config.kv_cache_memory_bytes is not None:
        budget_bytes = config.kv_cache_memory_bytes
    elif device.type == "cpu":
        budget_bytes = cpu_budget_bytes(blocks_for(max_model_len, config.block_size) * block_bytes)
    else:
        num_logits = min(config.max_num_seqs, max_num_batched_tokens)
        peak = peak_activation_bytes(forward, layers, backend, max_num_batched_tokens, num_logits, device)
        budget_bytes = gpu_budget_bytes(device, config.gpu_memory_utilization, peak)
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
