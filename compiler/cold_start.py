"""A compiled model from a module: trace, passes, split, compile. What is kept of it, `stored/` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.compiler.apply_passes import apply_passes
from piecegraph.compiler.build import BeforeCompile, NamedInputs, build
from piecegraph.compiler.dynamic_dims import DynamicDims
from piecegraph.compiler.expectations import check_expected_run
from piecegraph.compiler.interface import Interface
from piecegraph.compiler.kernels_ahead import launches_ahead
from piecegraph.compiler.piece_compiler import PieceCompiler
from piecegraph.compiler.ready import Ready, Weights
from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.trace import ArgumentInput, BoundInput, Traced, trace
from piecegraph.config import CompileConfig
from piecegraph.passes.pipeline import pipeline
from piecegraph.progress import OnPhase, Phase, timed_phase


@dataclass(frozen=True, slots=True)
class ColdStart:
    """A model that was compiled, and what it was compiled from."""

    ready: Ready
    traced: Traced  # as passes left it


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
) -> ColdStart:
    """Trace `module(*args, **kwargs)` and compile what comes of it. Raises as `piecegraph.compile`."""
    compiler.start()
    on_phase(Phase(name="trace"))
    traced = trace(module, args, kwargs, dynamic_dims)
    on_phase(Phase(name="trace", seconds=traced.seconds))
    with timed_phase(on_phase, "passes"):
        weights = Weights(module, _bound(traced))  # as they are in the module, before passes merge some
        device_type = next((each.tensor.device.type for each in _bound(traced)), "cpu")
        passes = pipeline(config.passes, device_type)
        check_expected_run(config.expect, (each.name for each in passes))
        is_split_op = split_op_matcher(traced.graph_module.graph, config.split_ops)
        traced, rows = apply_passes(traced, passes, is_split_op, config)
        launches = launches_ahead(traced.graph_module.graph, is_split_op, _bound_placeholders(traced))
    built = build(
        traced.graph_module,
        _named_inputs(traced),
        config,
        compiler,
        passes,
        rows,
        is_split_op=is_split_op,
        trace_seconds=traced.seconds,
        on_phase=on_phase,
        before_compile=before_compile,
        launches=launches,
    )
    return ColdStart(Ready(Interface.of(traced), built, weights), traced)


def _bound(traced: Traced) -> list[BoundInput]:
    return [each for each in traced.inputs if isinstance(each, BoundInput)]


def _bound_placeholders(traced: Traced) -> dict[str, torch.Tensor]:
    placeholders = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, traced.inputs, strict=True)
    return {node.name: bound.tensor for node, bound in pairs if isinstance(bound, BoundInput)}


def _named_inputs(traced: Traced) -> NamedInputs:
    names = []
    bound: dict[str, torch.Tensor] = {}
    for graph_input in traced.inputs:
        name = graph_input.name
        if isinstance(graph_input, BoundInput):
            while name in bound:
                name += "_"
            bound[name] = graph_input.tensor
        elif isinstance(graph_input, ArgumentInput) and name in bound:
            name = f"argument {name}"
        names.append(name)
    return NamedInputs(
        names=tuple(names), bound=bound, size_symbols=traced.size_symbols, call_sizes=traced.size_symbols
    )
