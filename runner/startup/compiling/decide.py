"""The decisions that follow from a model's graph before compilation, and the compilation of a step's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.select import BackendChoice, choose_backend
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, plan_for
from piecegraph.runner.kv_cache.groups import KVCacheLayout, fitting_block_size, kv_cache_layout
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.models.mechanisms.support import check_layers
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.speculative.common.fitting_draft import num_rollback, refuse_states
from piecegraph.runner.startup.compiling.step_kernels import NUM_TOKENS, SplitOpsModel, launch_step_kernels
from piecegraph.runner.state_layers.layer import StateLayer, state_layers, with_libraries
from piecegraph.runner.state_layers.libraries.installed import installed
from piecegraph.runner.step.model_step import build_step, needs_host_batches

AllLayers = Callable[[tuple[AttentionLayer, ...]], tuple[AttentionLayer, ...]]
"""A function from the layers of one stage of a pipeline to those of all stages, in the model's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The attention layers, cache layout, backend and graph plan that follow from a model's graph."""

    calls: tuple[SplitCall, ...]
    config: EngineConfig  # with the block size that fits the layers
    layers: tuple[AttentionLayer, ...]
    state_layers: tuple[StateLayer, ...]
    layout: KVCacheLayout
    attention: BackendChoice
    plan: GraphPlan


def decide_for(
    calls: tuple[SplitCall, ...],
    loaded: LoadedModel,
    config: EngineConfig,
    max_model_len: int,
    max_num_tokens: int,
    all_layers: AllLayers | None = None,
) -> Decided:
    """Return the decisions for a model whose graph has these split calls. Raises if the graph cannot be served.

    All stages of a pipeline have the same groups of blocks, those of `all_layers`; a stage has the tensors of its own.
    """
    layers, with_states = (
        attention_layers(calls, keeps_fp8=config.keeps_fp8),
        with_libraries(state_layers(calls, rollback=num_rollback(config)), loaded.device.type, installed),
    )
    laid_out = layers if all_layers is None else all_layers(layers)
    check_layers(laid_out, loaded.config, with_states, max_model_len=max_model_len)
    refuse_states(config, with_states)
    if config.cached_states is not None and not with_states:
        raise ConfigError(
            f"cached_states={config.cached_states}, but no layer of {type(loaded.model).__name__} keeps a state; leave "
            "it out."
        )
    if config.may_raise_block_size and with_states:
        config = replace(config, block_size=fitting_block_size((*layers, *with_states), config.block_size))
    choice = choose_backend(config.attention_backend, layers, loaded.device, config.block_size)
    plan = plan_for(
        config,
        choice.backend,
        loaded.device,
        can_split=bool(layers or with_states),
        has_states=bool(with_states),
        has_only_int8_weights=loaded.has_only_int8_weights,
        max_num_batched_tokens=max_num_tokens,
    )
    layout = kv_cache_layout(
        (*laid_out, *with_states),
        max_model_len=max_model_len,
        block_size=config.block_size,
        kernel_block_size=choice.backend.kernel_block_size(config.block_size),
        keeps_boundaries=config.enable_prefix_caching is not False,
    )
    if all_layers is not None:
        layout = layout.of_stage({layer.name for layer in layers})
    return Decided(
        calls=calls, config=config, layers=layers, state_layers=with_states, layout=layout, attention=choice, plan=plan
    )


def compile_step_kernels(decided: Decided, loaded: LoadedModel, max_model_len: int, max_num_tokens: int) -> None:
    """Compile the kernels of a step that are in no piece, by launching them over temporary buffers."""
    config = decided.config
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    backend = decided.attention.backend
    model = SplitOpsModel(decided.calls, vocab_size=vocab_size, dtype=loaded.dtype, max_num_reqs=config.max_num_seqs)
    step = build_step(
        model,
        layers=decided.layers,
        state_layers=[  # those that do not run need no memory for last states
            layer if layer.name in model.layers else replace(layer, rollback=0) for layer in decided.state_layers
        ],
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
    needs_host_batch = needs_host_batches(backend, decided.state_layers, loaded.device)
    launch_step_kernels(step, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
