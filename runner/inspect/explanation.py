"""The explanation of what would run, and why: every decision about a model, without its weights and without the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.replay.expected_cost import SplitOpCost, expected_costs
from piecegraph.compiler.graphs.replay.prepared_ops import prepared_ops
from piecegraph.compiler.piece_compilers.static_piece import gains_by_static_size
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import CallStep, Plan, SplitCall
from piecegraph.compiler.splitting.segments import num_graphs
from piecegraph.errors import ConfigError, UsageError
from piecegraph.passes.kernels.common.gpu_limits import H200, GpuLimits
from piecegraph.passes.matching.graph_pass import Place
from piecegraph.passes.pipeline import default_passes, pipeline
from piecegraph.paths import traffic_folder
from piecegraph.progress import OnPhase
from piecegraph.runner.attention.interface.backend import AttentionBackend
from piecegraph.runner.attention.interface.cache_spec import CachedLayer
from piecegraph.runner.attention.interface.kv_cache import allocate_kv_caches, bytes_per_block
from piecegraph.runner.attention.interface.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.interface.op_call import ATTENTION_OPS, AttentionCall
from piecegraph.runner.attention.select import BackendChoice, check_backend_name, choose_backend
from piecegraph.runner.common.config_on_device import batched_tokens, static_sizes, static_sizes_note
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.capture_sizes import check_capture_sizes
from piecegraph.runner.cudagraphs.dispatch_table import DispatchRange, decode_ranges, mixed_ranges
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, after_passes, num_first_draft_tokens, plan_for
from piecegraph.runner.cudagraphs.measured_dispatcher import CostChoice, MeasuredDispatcher
from piecegraph.runner.cudagraphs.measured_times import why_not_measured
from piecegraph.runner.inspect.layer_view import LayerView, middle_layer
from piecegraph.runner.inspect.linear_view import LinearRow, linear_rows
from piecegraph.runner.inspect.untraceable import refused_by_module
from piecegraph.runner.kv_cache.groups import fitting_block_size, kv_cache_layout
from piecegraph.runner.kv_cache.scales import check_calibration, scales_note, shift_note
from piecegraph.runner.lora.modules import lora_options
from piecegraph.runner.models.config.device import resolve_device
from piecegraph.runner.models.config.dtype import resolve_dtype
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.cpu_kernels import choose_cpu_kernels, cpu_kernels_notes
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules
from piecegraph.runner.models.mechanisms.support import check_layers
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.pipeline_parallel.summary import StageSummary, stages_summary
from piecegraph.runner.speculative.common.fitting_draft import (
    FittingDraft,
    fitting_draft,
    naming_the_draft,
    num_rollback,
    refuse_states,
)
from piecegraph.runner.speculative.heads.head_config import HeadConfig, is_head, naming_the_head, with_head
from piecegraph.runner.speculative.heads.load_head import head_on_meta
from piecegraph.runner.state_layers.layer import StateLayer, library_notes, state_layers, with_libraries
from piecegraph.runner.state_layers.libraries.installed import installed
from piecegraph.runner.state_layers.modules.replace import has_state_layers
from piecegraph.runner.tensor_parallel.expert_ranks import expert_ranks
from piecegraph.runner.tensor_parallel.summary import RanksSummary, ranks_summary
from piecegraph.runner.traffic.kept import kept_key, read_kept
from piecegraph.runner.traffic.traffic_sizes import with_traffic_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Attention layers that differ in their name only."""

    layers: int
    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int  # keys a query sees; 0: all before it
    softcap: float
    has_sinks: bool
    is_latent: bool  # one vector of a token serves all heads, and only it is cached
    chunk_size: int  # tokens of a chunk, of which a query sees its own; 0: no chunks
    has_slopes: bool  # a bias by position is added to the scores of keys (ALiBi)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOpRow:
    """Calls of a split op that cost the same in a PIECEWISE replay."""

    op: str
    calls: int
    cost: str
    note: str  # why the call costs more than a launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All decisions for a model and a config. Captures are as planned: one that fails, also for lack of memory, is
    known only when it is made."""

    source: str  # the folder, file or hub id
    model_class: str
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    is_assumed: bool  # True: the machine has no such device
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention: tuple[AttentionRow, ...]
    cache_bytes_per_token: int
    backend: str
    backend_reasons: tuple[str, ...]
    compiler: str
    compile_sizes: tuple[int, ...]
    report: CompileReport  # of eager pieces: the effects of a piece compiler are not known
    layer: LayerView | None  # the middle one; None: the model has no attention
    linears: tuple[LinearRow, ...]
    num_graphs: int  # of a PIECEWISE bucket
    split_ops: tuple[SplitOpRow, ...]
    configured_mode: CUDAGraphMode
    decode_mode: CUDAGraphMode
    mixed_mode: CUDAGraphMode
    num_full: int  # graphs to capture
    num_piecewise: int
    decode: tuple[DispatchRange, ...]
    mixed: tuple[DispatchRange, ...]
    by_cost: tuple[CostChoice, ...]  # batches for which something is cheaper than the smallest graph that fits
    drafting: str  # how tokens are drafted, and how many; "": they are not
    verification: tuple[DispatchRange, ...]  # batches of requests that verify all drafts each
    draft: Explanation | None  # the model or head that drafts; its graphs are those of its passes
    notes: tuple[str, ...]
    num_engines: int  # that requests are divided among; all other fields are about one of them
    ranks: RanksSummary | None  # None: one rank; all other fields are about one of several
    stages: tuple[StageSummary, ...]  # empty: one stage; all other fields are about all stages together
    slower_paths: tuple[str, ...]  # every reason for something slower than what was asked for

    @property
    def replay_costs(self) -> dict[str, int]:
        """The parts of a PIECEWISE replay, as `Graphs.costs` will report them."""
        costs = Counter({"graph": self.num_graphs})
        for row in self.split_ops:
            costs[row.cost] += row.calls
        return dict(costs)


def explain(config: EngineConfig, *, assume_gpu: bool = False, on_phase: OnPhase | None = None) -> Explanation:
    """Trace the model as `LLM` would and take its decisions.

    Reads the model's config and no weights, compiles and captures nothing, and needs no memory for parameters: they
    are meta tensors.

    `assume_gpu`: where there is no GPU, decide as on an NVIDIA GPU that has all our kernels need.

    Raises what `LLM` would for this config: `ConfigError` (also for a strict downgrade), `ModelError`,
    `CompileError` and their subclasses; `UsageError` if `assume_gpu` and a device contradict each other.
    """
    check_backend_name(config.attention_backend)
    device, is_assumed = _target(config, assume_gpu)
    max_num_tokens = batched_tokens(config, device.type)
    _check_sizes(config, max_num_tokens)
    hf_config = load_config(config.source)
    dtype = resolve_dtype(config.dtype, hf_config, device, config.quantization)
    choose_cpu_kernels(config.quantization, hf_config, device.type, config.compile)
    key = kept_key(hf_config, dtype, device)
    max_model_len = model_length(hf_config, config.max_model_len, first_position(config.source, hf_config).value)
    config, sizes_note = with_traffic_sizes(config, read_kept(traffic_folder(), key), max_num_tokens)
    lens = max_model_len, max_num_tokens
    draft = fitting_draft(config, hf_config, lens, dtype=dtype, needs_weights=False)
    config, head = with_head(config, hf_config, needs_weights=False)
    about = _About(device=device, is_assumed=is_assumed, lens=lens, key=key, on_phase=on_phase)
    loaded, notes = _load(config, hf_config, dtype, device, max_model_len, on_phase)
    check_calibration(config, has_states=has_state_layers(loaded.model))
    notes = (
        *([str(head)] if head is not None else []),
        *notes,
        *cpu_kernels_notes(device.type),
        *sizes_note,
        *scales_note(config),
    )

    def drafting(block_size: int) -> Explanation | None:
        if head is not None:
            return _explain_head(replace(config, block_size=block_size), head, hf_config, dtype, about)
        return None if draft is None else _explain_draft(draft, block_size, assume_gpu, on_phase)

    return _explain_loaded(config, loaded, notes, about, drafting)


class _About(NamedTuple):
    """What the explanations of a model and of its head have in common."""

    device: torch.device
    is_assumed: bool
    lens: tuple[int, int]  # the most tokens of a text, and of a step
    key: str  # of the model's traffic
    on_phase: OnPhase | None


def _explain_loaded(
    config: EngineConfig,
    loaded: LoadedModel,
    notes: tuple[str, ...],
    about: _About,
    explain_draft: Callable[[int], Explanation | None],
) -> Explanation:
    """Return the explanation of `loaded`, a model or a head over meta tensors.

    `explain_draft`: a function from the size of a block to the explanation of what drafts for it.
    """
    device, is_assumed, (max_model_len, max_num_tokens), key, on_phase = about
    dtype = loaded.dtype
    traced = _trace(config, loaded, device, is_assumed, max_num_tokens, max_model_len, on_phase)
    layers, choice, plan, pieces, config = traced.layers, traced.choice, traced.graph_plan, traced.plan, traced.config
    cached: tuple[CachedLayer, ...] = (*layers, *traced.state_layers)
    layout = kv_cache_layout(
        cached,
        max_model_len=max_model_len,
        block_size=config.block_size,
        kernel_block_size=choice.backend.kernel_block_size(config.block_size),
        keeps_boundaries=config.enable_prefix_caching is not False,
    )
    is_patched = choice.backend.patches_graphs and device.type == "cuda" and config.graph_kind != "recorded"
    costs = expected_costs(pieces, prepared_ops(), _refusals(choice.backend, layers), is_patched=is_patched)
    gaining = any(map(gains_by_static_size, traced.unique))
    sizes = static_sizes(config, is_cuda=device.type == "cuda") if gaining else ()
    dispatcher, dispatch_notes = _dispatcher(config, plan, sizes, key)
    split_ops = _split_op_rows(costs)
    decode, verification, mixed = _ranges(config, dispatcher, max_num_tokens)
    drafting = explain_draft(config.block_size)
    return Explanation(
        source=config.source.model,
        model_class=type(loaded.model).__name__,
        num_parameters=loaded.num_parameters,
        dtype=dtype,
        device=device,
        is_assumed=is_assumed,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        attention=_attention_rows(layers),
        cache_bytes_per_token=bytes_per_block(layers, 1),
        backend=choice.backend.name,
        backend_reasons=choice.reasons,
        compiler=config.compile.compiler,
        compile_sizes=sizes,
        report=traced.report,
        layer=middle_layer(pieces, traced.unique, choice.backend.name, _limits(device, is_assumed), device.type),
        linears=traced.linears,
        num_graphs=num_graphs(
            pieces, has_before=True, has_after=True, is_patched=all(cost.cost == "patch" for cost in costs)
        ),
        split_ops=split_ops,
        configured_mode=CUDAGraphMode.parse(config.cudagraph_mode),
        decode_mode=plan.resolved.decode_mode,
        mixed_mode=plan.resolved.mixed_mode,
        num_full=len(plan.full),
        num_piecewise=len(plan.piecewise),
        decode=decode,
        mixed=mixed,
        by_cost=dispatcher.choices if isinstance(dispatcher, MeasuredDispatcher) else (),
        drafting="" if config.is_draft else str(config.speculative or ""),
        verification=verification,
        draft=drafting,
        notes=(
            *notes,
            *(() if config.is_draft else shift_note(config, layers)),
            *layout.notes,
            *library_notes(traced.state_layers),
            *dispatch_notes,
            *_trace_notes(traced.report),
        ),
        num_engines=config.data_parallel_size,
        ranks=None if loaded.rank_plan is None else ranks_summary(loaded.model, loaded.rank_plan),
        stages=_stages(config, loaded),
        slower_paths=tuple(_slower_paths(config, choice, plan, split_ops, decode, mixed, verification, drafting)),
    )


def _dispatcher(
    config: EngineConfig, plan: GraphPlan, sizes: Sequence[int], key: str
) -> tuple[Dispatcher, tuple[str, ...]]:
    """Return the dispatcher over all planned graphs, by the costs that the last start has measured, and notes."""
    planned: dict[str, Any] = {
        "full": plan.full,
        "piecewise": plan.piecewise,
        "resolved": plan.resolved,
        "static_sizes": sizes,
    }
    if not config.measure_graphs or not plan.has_graphs:
        return Dispatcher(**planned), ()
    if reason := why_not_measured(config):
        return Dispatcher(**planned), (reason,)
    times = read_kept(traffic_folder(), key).times
    if not times.graphs:
        note = "measure_graphs: no start of this model has measured its graphs on such a device yet"
        return Dispatcher(**planned), (note,)
    note = f"measure_graphs: dispatch is by the times of the last start that measured, {len(times.graphs)} graphs"
    return MeasuredDispatcher(**planned, times=times), (note,)


def _check_sizes(config: EngineConfig, max_num_tokens: int) -> None:
    if config.cudagraph_capture_sizes is not None:
        check_capture_sizes(config.cudagraph_capture_sizes, max_num_tokens)


def _trace_notes(report: CompileReport) -> tuple[str, ...]:
    return (f"trace: {report.trace_note}",) if report.trace_note else ()


def _stages(config: EngineConfig, loaded: LoadedModel) -> tuple[StageSummary, ...]:
    """Return the stages of a pipeline; none without one."""
    if config.pipeline_parallel_size == 1:
        return ()
    return stages_summary(loaded.model, config.pipeline_parallel_size, loaded.dtype.itemsize)


def _load(
    config: EngineConfig,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    on_phase: OnPhase | None,
) -> tuple[LoadedModel, tuple[str, ...]]:
    """Return the model over meta tensors, and notes about it."""
    source = replace(config.source, load_format="dummy")
    options: dict[str, Any] = {
        "num_ranks": config.tensor_parallel_size,
        "experts": expert_ranks(config),
        "quantization": config.quantization,
        "lora": lora_options(config),
        "runs_on": device,
    }
    loaded = load_model(source, hf_config, dtype=dtype, device=torch.device("meta"), on_phase=on_phase, **options)
    notes = (*loaded.notes, *fix_longrope(loaded.model, max_model_len))
    return loaded, (*notes, *apply_layer_rules(loaded.model, max_model_len))


def _explain_draft(draft: FittingDraft, block_size: int, assume_gpu: bool, on_phase: OnPhase | None) -> Explanation:
    with naming_the_draft():
        return explain(replace(draft.config, block_size=block_size), assume_gpu=assume_gpu, on_phase=on_phase)


def _explain_head(
    config: EngineConfig, head: HeadConfig, hf_config: PreTrainedConfig, dtype: torch.dtype, about: _About
) -> Explanation:
    with naming_the_head():
        loaded = head_on_meta(head, hf_config, dtype)
        of_head = replace(config, source=head.source, dtype=dtype, is_draft=True, may_raise_block_size=False)
        return _explain_loaded(of_head, loaded, (), about, lambda block_size: None)


def _ranges(
    config: EngineConfig, dispatcher: Dispatcher, max_num_tokens: int
) -> tuple[tuple[DispatchRange, ...], tuple[DispatchRange, ...], tuple[DispatchRange, ...]]:
    """Return the ranges of requests that decode, of requests that verify all drafts each, and of other batches.

    Of a draft model or a head they are those of its passes, and no others.
    """
    most = config.max_num_seqs
    if config.is_draft:
        count = num_first_draft_tokens(config.speculative)
        return decode_ranges(dispatcher, max_num_seqs=most, uniform_token_count=count), (), ()
    decode = decode_ranges(dispatcher, max_num_seqs=min(most, max_num_tokens))
    mixed = mixed_ranges(dispatcher, max_num_seqs=most, max_num_tokens=max_num_tokens)
    if config.speculative is None:
        return decode, (), mixed
    count = 1 + config.speculative.num_speculative_tokens
    most = min(most, max_num_tokens // count)
    return decode, decode_ranges(dispatcher, max_num_seqs=most, uniform_token_count=count), mixed


class _Traced(NamedTuple):
    """The traced model, and the decisions that its attention layers lead to."""

    config: EngineConfig  # with the block size that fits the layers
    layers: tuple[AttentionLayer, ...]
    state_layers: tuple[StateLayer, ...]
    choice: BackendChoice
    graph_plan: GraphPlan
    report: CompileReport
    plan: Plan
    unique: Sequence[UniquePiece]
    linears: tuple[LinearRow, ...]


def _trace(
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
    is_assumed: bool,
    max_num_tokens: int,
    max_model_len: int,
    on_phase: OnPhase | None,
) -> _Traced:
    """Trace the model over meta tensors, and decide on its attention layers before pieces are made, as `LLM` does."""
    decided: list[
        tuple[EngineConfig, tuple[AttentionLayer, ...], tuple[StateLayer, ...], BackendChoice, GraphPlan]
    ] = []

    def decide(calls: tuple[SplitCall, ...]) -> None:
        layers = attention_layers(calls, keeps_fp8=config.keeps_fp8)
        with_states = with_libraries(
            state_layers(calls, rollback=num_rollback(config)),
            device.type,
            lambda: installed(imports=not is_assumed),
        )
        check_layers(layers, loaded.config, with_states, max_model_len=max_model_len)
        refuse_states(config, with_states)
        fitted = config
        if config.may_raise_block_size and with_states:
            fitted = replace(config, block_size=fitting_block_size((*layers, *with_states), config.block_size))
        choice = choose_backend(config.attention_backend, layers, device, fitted.block_size, is_assumed=is_assumed)
        plan = plan_for(
            config,
            choice.backend,
            device,
            can_split=bool(layers or with_states),
            has_states=bool(with_states),
            has_only_int8_weights=loaded.has_only_int8_weights,
            max_num_batched_tokens=max_num_tokens,
        )
        decided.append((fitted, layers, with_states, choice, plan))

    with (
        torch.no_grad(),
        refused_by_module(loaded.model),
        compile_module(
            loaded.forward_module(),
            replace(
                config.compile, compiler="eager", passes=_passes(config, device), expect=_expected_here(config, device)
            ),
            dynamic_dims=loaded.dynamic_dims,
            example_inputs=loaded.example_inputs(torch.device("meta")),
            on_phase=on_phase,
            before_compile=decide,
        ) as compiled,
    ):
        ((fitted, layers, with_states, choice, graph_plan),) = decided
        graph_plan = after_passes(graph_plan, {row.name: row.matches for row in compiled.report().passes}, len(layers))
        plan, unique = compiled.plan, compiled.unique_pieces
        schemes = loaded.quantisation.methods if loaded.quantisation is not None else {}
        linears = linear_rows(plan, unique, compiled.bound, loaded.model, schemes, device.type)
        return _Traced(fitted, layers, with_states, choice, graph_plan, compiled.report(), plan, unique, linears)


def _limits(device: torch.device, is_assumed: bool) -> GpuLimits:
    """Return the limits of the GPU for which decisions are explained."""
    return H200 if is_assumed or device.type != "cuda" else GpuLimits.of(device)


def _target(config: EngineConfig, assume_gpu: bool) -> tuple[torch.device, bool]:
    """Return the device for which decisions are explained, and whether it is only assumed."""
    wanted = None if config.device is None else str(config.device)
    wants_gpu = wanted is not None and wanted.startswith("cuda")
    if assume_gpu and wanted is not None and not wants_gpu:
        raise UsageError(f"device={wanted!r} is not a GPU to assume; leave one of the two out.")
    if assume_gpu and not torch.cuda.is_available():
        return torch.device(wanted or "cuda"), True
    if wants_gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"device={wanted!r}, but torch sees no NVIDIA GPU here. Assume one (--assume-gpu), or use device='cpu'."
        )
    return resolve_device(config.device), False


def _passes(config: EngineConfig, device: torch.device) -> tuple[Any, ...]:
    """Return the passes for the explained device; the traced parameters, meta tensors, are on no device."""
    if config.compile.passes is not None:
        return config.compile.passes
    return tuple(each.name for each in default_passes(device.type, config.tensor_parallel_size))


def _expected_here(config: EngineConfig, device: torch.device) -> dict[str, int | str]:
    """Return the expected counts of passes that need no Inductor."""
    inside = {each.name for each in pipeline(config.compile.passes, device.type) if each.place is Place.POST_GRAD}
    return {name: wanted for name, wanted in config.compile.expect.items() if name not in inside}


def _refusals(backend: AttentionBackend, layers: Sequence[AttentionLayer]) -> Callable[[CallStep], str | None]:
    """Return a function from an attention step to why the backend does not prepare it, or None.

    The function prepares a call of one token on the CPU.
    """
    cpu = torch.device("cpu")
    by_name = {layer.name: layer for layer in layers}
    impl = backend.impl()

    def refusal(step: CallStep) -> str | None:
        if step.op not in ATTENTION_OPS:
            return None
        layer = by_name[step.args[-1]]
        call = AttentionCall(
            query=torch.empty(1, layer.num_q_heads, layer.key_dim, dtype=layer.dtype),
            key=torch.empty(1, layer.num_kv_heads, layer.key_dim, dtype=layer.dtype),
            value=torch.empty(1, layer.num_kv_heads, layer.value_dim, dtype=layer.dtype),
            out=torch.empty(1, layer.num_q_heads, layer.value_dim, dtype=layer.dtype),
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=torch.empty(layer.num_q_heads) if layer.has_sinks else None,
            is_latent=layer.is_latent,
            chunk_size=layer.chunk_size,
            slopes=torch.empty(layer.num_q_heads) if layer.has_slopes else None,
        )
        prepared = impl.prepare(call, allocate_kv_caches([layer], 1, 1, cpu)[layer.name])
        return prepared if isinstance(prepared, str) else None

    return refusal


def _split_op_rows(costs: Sequence[SplitOpCost]) -> tuple[SplitOpRow, ...]:
    counts = Counter(costs)
    return tuple(SplitOpRow(op=cost.op, calls=count, cost=cost.cost, note=cost.note) for cost, count in counts.items())


def _attention_rows(layers: Sequence[AttentionLayer]) -> tuple[AttentionRow, ...]:
    names = [name for name in AttentionRow.__dataclass_fields__ if name != "layers"]
    counts = Counter(tuple(getattr(layer, name) for name in names) for layer in layers)
    return tuple(AttentionRow(layers=count, **dict(zip(names, kind, strict=True))) for kind, count in counts.items())


def _slower_paths(
    config: EngineConfig,
    choice: BackendChoice,
    plan: GraphPlan,
    split_ops: Sequence[SplitOpRow],
    decode: Sequence[DispatchRange],
    mixed: Sequence[DispatchRange],
    verification: Sequence[DispatchRange],
    draft: Explanation | None,
) -> list[str]:
    """Return every reason for something slower than what was asked for, each once."""
    found = [f"attention_backend: {reason}" for reason in choice.reasons[:-1]]
    found += [f"cudagraph_mode: {reason}" for reason in plan.resolved.reasons]
    found += static_sizes_note(config)
    if plan.piecewise:
        found += [f"split ops: {row.calls} x {row.cost}: {row.note}" for row in split_ops if row.note]
    own = "passes for" if config.is_draft else "decode of"
    for what, ranges in ((own, decode), ("verifications of", verification), ("other batches of", mixed)):
        unit = "tokens" if ranges is mixed else "requests"
        found += [
            f"dispatch: {what} {row.first} to {row.last} {unit} run {row.mode.value}: {row.reason}"
            for row in ranges
            if row.reason is not None
        ]
    if draft is not None:
        what = "head" if config.speculative is not None and is_head(config.speculative.method) else "draft model"
        found += [f"{what}: {reason}" for reason in draft.slower_paths if reason not in found]
    return found
