"""The compile of a module without a cached plan: trace, passes, split, compile."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.compiler.building.bound_weights import BoundWeights
from piecegraph.compiler.building.build import BeforeCompile, build
from piecegraph.compiler.building.deferred_weights import DeferredWeights, with_tensors_of
from piecegraph.compiler.building.make_plan import NamedInputs
from piecegraph.compiler.building.ready import ReadyModel
from piecegraph.compiler.common.split_ops import split_op_matcher
from piecegraph.compiler.own_kernels.precompile import launch_all, precompile_launches
from piecegraph.compiler.piece_compilers.protocol import PieceCompiler
from piecegraph.compiler.rewriting.apply_passes import apply_passes
from piecegraph.compiler.rewriting.expectations import check_expected_run
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.signature import ArgumentInput, BoundInput
from piecegraph.compiler.tracing.trace import Traced, trace
from piecegraph.config import CompileConfig
from piecegraph.passes.pipeline import pipeline
from piecegraph.progress import OnPhase, Phase, timed_phase


@dataclass(frozen=True, slots=True)
class ColdStart:
    """A compiled model, and the trace from which it was compiled."""

    ready: ReadyModel
    traced: Traced  # after all passes


def cold_start(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_dims: DynamicDims,
    config: CompileConfig,
    compiler: PieceCompiler,
    *,
    on_phase: OnPhase,
    before_compile: BeforeCompile | None,
    deferred: DeferredWeights | None = None,
) -> ColdStart:
    """Trace `module(*args, **kwargs)` and compile the graph.

    With `deferred`, `module` has fake tensors, and the compiled model reads the tensors of `deferred.module()`, which
    is called while pieces compile.

    Raises what `piecegraph.compile` raises, and `TracedModelMismatch`.
    """
    compiler.start()
    on_phase(Phase(name="trace"))
    traced = trace(module, args, kwargs, dynamic_dims)
    on_phase(Phase(name="trace", seconds=traced.seconds, detail=traced.note))
    with timed_phase(on_phase, "passes"):
        watched = _bound(traced)  # the module's own tensors, before passes merge some
        device_type = next((each.tensor.device.type for each in watched), "cpu")
        passes = pipeline(config.passes, device_type)
        check_expected_run(config.expect, (each.name for each in passes))
        is_split_op = split_op_matcher(traced.graph_module.graph, config.split_ops)
        traced, rows = apply_passes(traced, passes, is_split_op, config)
        launches = precompile_launches(traced.graph_module.graph, is_split_op)
        placeholders = tuple(node.name for node in traced.graph_module.graph.find_nodes(op="placeholder"))
    names = _bound_names(traced)

    def bind() -> dict[str, torch.Tensor]:
        nonlocal module, traced, watched
        if deferred is not None:
            module = deferred.module()
            traced, watched = with_tensors_of(module, traced, watched)
        with timed_phase(on_phase, "kernels") if launches else contextlib.nullcontext():
            launch_all(launches, _bound_placeholders(placeholders, traced))
        return {name: each.tensor for name, each in zip(names, _bound(traced), strict=True)}

    built = build(
        traced.graph_module,
        _named_inputs(traced, names),
        config,
        compiler,
        passes,
        rows,
        is_split_op=is_split_op,
        trace_seconds=traced.seconds,
        trace_note=traced.note,
        on_phase=on_phase,
        bind=bind,
        before_compile=before_compile,
    )
    weights = BoundWeights(module, watched, built.namespace.values())
    return ColdStart(ReadyModel(traced.interface, built, weights), traced)


def _bound(traced: Traced) -> list[BoundInput]:
    return [each for each in traced.inputs if isinstance(each, BoundInput)]


def _bound_placeholders(names: Sequence[str], traced: Traced) -> dict[str, torch.Tensor]:
    pairs = zip(names, traced.inputs, strict=True)
    return {name: bound.tensor for name, bound in pairs if isinstance(bound, BoundInput)}


def _bound_names(traced: Traced) -> list[str]:
    """Return a distinct name for each bound input, in order."""
    names: dict[str, None] = {}
    for each in _bound(traced):
        name = each.name
        while name in names:
            name += "_"
        names[name] = None
    return list(names)


def _named_inputs(traced: Traced, bound_names: Sequence[str]) -> NamedInputs:
    names = []
    rest = iter(bound_names)
    for each in traced.inputs:
        if isinstance(each, BoundInput):
            names.append(next(rest))
        else:
            is_taken = isinstance(each, ArgumentInput) and each.name in bound_names
            names.append(f"argument {each.name}" if is_taken else each.name)
    return NamedInputs(
        names=tuple(names),
        bound=frozenset(bound_names),
        size_symbols=traced.size_symbols,
        call_sizes=traced.size_symbols,
    )
