"""`torch.compile(model, backend="piecegraph")`: our compiler by name, under torch's own guards.

torch finds `compile_backend` by entry point; nothing of ours need be imported by the caller.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.apply_passes import apply_to_graph
from piecegraph.compiler.build import Built, NamedInputs, build, piece_compiler
from piecegraph.compiler.dynamo import code_being_traced, compiled_by_torch
from piecegraph.compiler.expectations import check_expected_run
from piecegraph.compiler.guards import GuardAudit
from piecegraph.compiler.normalize import symbol_of
from piecegraph.compiler.pass_contexts import FixedInputs
from piecegraph.compiler.plan import Plan, SplitCall
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.config import CompileConfig
from piecegraph.errors import CompileError, UsageError
from piecegraph.passes.pipeline import pipeline
from piecegraph.passes.torch_ir import value_of

_GUARDS_KEPT = GuardAudit(
    (), note="torch.compile keeps and checks its own guards on every call; piecegraph drops none of them."
)


class _Origin:
    """Where a graph came from: the code traced, outermost first, and the tensors it was traced with."""

    def __init__(self, code: tuple[types.CodeType, ...], inputs: Sequence[Any]) -> None:
        self._code = code
        self._tensors = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]

    def is_of_function(self, function: Callable[..., Any]) -> bool:
        return bool(self._code) and self._code[0] is getattr(function, "__code__", None)

    def is_of_module(self, module: torch.nn.Module) -> bool:
        """It reads a weight of `module`; of a module without weights, it ran the forward."""
        weights = {id(t) for t in (*module.parameters(), *module.buffers())}
        if weights:
            return any((tensor := ref()) is not None and id(tensor) in weights for ref in self._tensors)
        return getattr(module.forward, "__code__", None) in self._code


@dataclass(frozen=True, slots=True)
class _SizePlace:
    """Where a call tells the value of a symbol: an argument, or a dim of one."""

    position: int
    dim: int | None

    def read(self, args: Sequence[Any]) -> int:
        return int(args[self.position] if self.dim is None else args[self.position].shape[self.dim])


def _size_places(placeholders: Sequence[fx.Node]) -> dict[str, _SizePlace]:
    """A place for every symbol that is, alone, a placeholder or a dim of one."""
    places: dict[str, _SizePlace] = {}
    for position, node in enumerate(placeholders):
        value = value_of(node)
        if (symbol := symbol_of(value)) is not None:
            places[symbol] = _SizePlace(position, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if (symbol := symbol_of(size)) is not None:
                    places.setdefault(symbol, _SizePlace(position, dim))
    return places


class GraphModel:
    """One graph that `torch.compile` handed us, compiled: Dynamo calls it with every input of the graph."""

    def __init__(self, built: Built, origin: _Origin, sizes: Mapping[str, _SizePlace]) -> None:
        self._built = built
        self._origin = origin
        self._sizes = {} if built.forwards.is_one else sizes

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        forward = self._built.forwards.at({symbol: place.read(args) for symbol, place in self._sizes.items()})
        with torch.no_grad():
            return forward(*args)

    def report(self) -> CompileReport:
        """Pieces, unique pieces and seconds per phase (tracing is torch's, so it counts as 0)."""
        return OWN_KERNELS.told_in(self._built.report)

    @property
    def source(self) -> str:
        """The stitched module's source."""
        return self._built.source

    @property
    def plan(self) -> Plan:
        """The stitched module as data."""
        return self._built.plan

    @property
    def split_calls(self) -> tuple[SplitCall, ...]:
        """Every call of a split op, in order."""
        return self._built.split_calls

    @property
    def guards(self) -> GuardAudit:
        """Says that torch keeps its guards."""
        return _GUARDS_KEPT


def _device_type(placeholders: Sequence[fx.Node]) -> str:
    """Where the graph's tensors are: those on the CPU may be sizes and tables of a model that is elsewhere."""
    values = map(value_of, placeholders)
    types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return next((kind for kind in sorted(types) if kind != "cpu"), "cpu")


_models_in_order: list[weakref.ref[GraphModel]] = []
_models_lock = threading.Lock()


def compile_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., tuple[Any, ...]]:
    """The `torch_dynamo_backends` entry point; `options` are `CompileConfig` fields.

    Returns a plain function, as tools that look into Dynamo's cache (depyf) expect.

    Raises `CompileError` where gradients would be wanted: piecegraph compiles for inference.
    """
    config = CompileConfig.from_options(options)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        raise CompileError(
            "piecegraph compiles for inference, but gradients are enabled and an input or parameter requires them. "
            "Call the model under torch.no_grad() or torch.inference_mode(), or call model.requires_grad_(False)."
        )
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sizes = _size_places(placeholders)
    inputs = NamedInputs(
        names=tuple(node.name for node in placeholders),
        bound=frozenset(),
        size_symbols={},
        call_sizes={symbol: symbol for symbol in sizes},
    )
    cache = CompileCache.open(config)
    compiler = piece_compiler(config, cache)
    try:
        with torch.no_grad():
            is_split_op = split_op_matcher(gm.graph, config.split_ops)
            passes = pipeline(config.passes, _device_type(placeholders))
            check_expected_run(config.expect, (each.name for each in passes))
            rows = apply_to_graph(gm, passes, FixedInputs(is_split_op), config)
            built = build(
                gm,
                inputs,
                config,
                compiler,
                passes,
                rows,
                is_split_op=is_split_op,
                trace_seconds=0.0,
                on_phase=lambda phase: None,
                bind=dict,  # all are arguments
            )
    finally:
        compiler.close()
    cache.keep_to_size()
    reason = cache.reason or "by name, torch traces each time"
    found = replace(built.report.cache, reason=reason, not_stored="; ".join(built.not_kept))
    built = replace(built, report=replace(built.report, cache=found))
    model = GraphModel(built, _Origin(code_being_traced(), example_inputs), sizes)
    with _models_lock:
        _models_in_order.append(weakref.ref(model))

    def run_graph(*args: Any) -> tuple[Any, ...]:
        return model(*args)

    return run_graph


def graph_models_of(compiled: Callable[..., Any]) -> tuple[GraphModel, ...]:
    """The models made for what `torch.compile` returned, oldest first. Raises `UsageError` for anything else."""
    with _models_lock:
        models = [model for ref in _models_in_order if (model := ref()) is not None]
        _models_in_order[:] = [weakref.ref(model) for model in models]
    module, function = compiled_by_torch(compiled)
    if module is None and function is None:
        raise UsageError(
            f"compiled_models takes what torch.compile(..., backend='piecegraph') returned, not {compiled!r}."
        )
    if module is not None:
        return tuple(model for model in models if model._origin.is_of_module(module))
    assert function is not None
    return tuple(model for model in models if model._origin.is_of_function(function))
