"""The decisions that follow from a model's graph before compilation, and the compilation of a step's own kernels."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.runner.attention.interface.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.select import BackendChoice, choose_backend
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, plan_graphs
from piecegraph.runner.kv_cache.groups import KVCacheLayout, kv_cache_layout
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.models.support import check_layers
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.startup.step_kernels import NUM_TOKENS, AttentionOnlyModel, launch_step_kernels
from piecegraph.runner.step.model_step import build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The attention layers, cache layout, backend and graph plan that follow from a model's graph."""

    calls: tuple[SplitCall, ...]
    layers: tuple[AttentionLayer, ...]
    layout: KVCacheLayout
    attention: BackendChoice
    plan: GraphPlan


def decide_for(
    calls: tuple[SplitCall, ...], loaded: LoadedModel, config: EngineConfig, max_model_len: int, max_num_tokens: int
) -> Decided:
    """Return the decisions for a model whose graph has these split calls. Raises if the graph cannot be served."""
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
        num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative else 0,
    )
    layout = kv_cache_layout(layers, max_model_len=max_model_len, block_size=config.block_size)
    return Decided(calls=calls, layers=layers, layout=layout, attention=choice, plan=plan)


def compile_step_kernels(
    decided: Decided, loaded: LoadedModel, config: EngineConfig, max_model_len: int, max_num_tokens: int
) -> None:
    """Compile the kernels of a step that are in no piece, by launching them over temporary buffers."""
    vocab_size = loaded.config.get_text_config(decoder=True).vocab_size
    backend = decided.attention.backend
    step = build_step(
        AttentionOnlyModel(decided.calls, vocab_size=vocab_size, dtype=loaded.dtype, max_num_reqs=config.max_num_seqs),
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
