"""The backend of `torch.compile(model, backend="piecegraph")`, which runs under torch's own guards.

torch finds `compile_backend` by its entry point, so the caller need not import piecegraph.
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

from piecegraph.compiler.building.build import BuildResult, build, piece_compiler
from piecegraph.compiler.building.make_plan import NamedInputs
from piecegraph.compiler.building.ready import SIZES_REMEMBERED
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.common.split_ops import split_op_matcher
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.rewriting.apply_passes import apply_to_graph
from piecegraph.compiler.rewriting.expectations import check_expected_run
from piecegraph.compiler.rewriting.pass_contexts import FixedInputs
from piecegraph.compiler.splitting.normalize import symbol_of
from piecegraph.compiler.splitting.overlaps import OverlapCheck
from piecegraph.compiler.splitting.plan import Plan, SplitCall
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.dynamo import code_being_traced, compiled_by_torch, drawn_from_objects
from piecegraph.compiler.tracing.guards import GuardAudit
from piecegraph.compiler.tracing.signature import NEGATED
from piecegraph.config import CompileConfig
from piecegraph.errors import CompileError, UsageError
from piecegraph.passes.matching.torch_ir import value_of
from piecegraph.passes.pipeline import pipeline

_TORCH_GUARDS = GuardAudit(
    (), note="torch.compile keeps and checks its own guards on every call; piecegraph drops none of them."
)


class _Origin:
    """The origin of a graph: the code objects that were traced, outermost first, and the graph's input tensors.

    It tells to which of several models compiled by `torch.compile` a graph belongs.
    """

    def __init__(self, code: tuple[types.CodeType, ...], inputs: Sequence[Any]) -> None:
        self._code = code
        self._tensors = [weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)]

    def matches_function(self, function: Callable[..., Any]) -> bool:
        """Return whether the trace began in `function`."""
        return bool(self._code) and self._code[0] is getattr(function, "__code__", None)

    def matches_module(self, module: torch.nn.Module) -> bool:
        """Return whether the graph reads a parameter or buffer of `module`.

        A module without any is matched by its forward, which must be among the traced code objects.
        """
        weights = {id(t) for t in (*module.parameters(), *module.buffers())}
        if weights:
            return any((tensor := ref()) is not None and id(tensor) in weights for ref in self._tensors)
        return getattr(module.forward, "__code__", None) in self._code


@dataclass(frozen=True, slots=True)
class _SizeSource:
    """The source of a size symbol's value in a call: an integer argument, or a dim of a tensor argument."""

    position: int  # of the argument
    dim: int | None  # None: the argument itself is the size

    def read(self, args: Sequence[Any]) -> int:
        return int(args[self.position] if self.dim is None else args[self.position].shape[self.dim])


def _size_sources(placeholders: Sequence[fx.Node]) -> dict[str, _SizeSource]:
    """Return a source for every size symbol that is a placeholder or a dim of one; `2 * s0` is no source of `s0`."""
    sources: dict[str, _SizeSource] = {}
    for position, node in enumerate(placeholders):
        value = value_of(node)
        if (symbol := symbol_of(value)) is not None:
            sources[symbol] = _SizeSource(position, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if (symbol := symbol_of(size)) is not None:
                    sources.setdefault(symbol, _SizeSource(position, dim))
    return sources


class GraphModel:
    """A graph compiled for `torch.compile`. Dynamo calls it with all inputs of the graph, weights included."""

    def __init__(self, built: BuildResult, origin: _Origin, sizes: Mapping[str, _SizeSource]) -> None:
        self._built = built
        self._origin = origin
        self._sizes = sizes if built.forwards.needs_sizes else {}
        overlaps = OverlapCheck(built.plan, built.namespace)
        self._overlaps = overlaps if overlaps.is_needed else None
        self._checked_sizes: set[tuple[int, ...]] = set()  # values of `_sizes` at which watched pieces have run

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the graph on all its inputs. Raises `InputMismatch` if a written input overlaps another one."""
        sizes = {symbol: source.read(args) for symbol, source in self._sizes.items()}
        key = tuple(sizes.values())
        forwards = self._built.forwards
        if self._overlaps is not None:
            self._overlaps.check(args)
        if key in self._checked_sizes:
            with torch.no_grad():
                return forwards.at(sizes)(*args)
        with torch.no_grad():
            outputs = forwards.watched_at(sizes)(*args)
        if len(self._checked_sizes) >= SIZES_REMEMBERED:
            self._checked_sizes.clear()
        self._checked_sizes.add(key)
        return outputs

    def report(self) -> CompileReport:
        """Return pieces, unique pieces and seconds per phase. The tracing time is 0, because torch traces."""
        return OWN_KERNELS.with_kernel_counts(self._built.forwards.with_failures(self._built.report))

    @property
    def source(self) -> str:
        """The Python source of the stitched module."""
        return self._built.source

    @property
    def plan(self) -> Plan:
        """The plan of the stitched module, as data."""
        return self._built.plan

    @property
    def split_calls(self) -> tuple[SplitCall, ...]:
        """All calls of split ops, in execution order."""
        return self._built.split_calls

    @property
    def guards(self) -> GuardAudit:
        """An audit that lists no guards, with a note that torch keeps and checks its own."""
        return _TORCH_GUARDS


def _device_type(placeholders: Sequence[fx.Node]) -> str:
    """Return the device type of the graph's inputs: "cpu" only if all of them are on the CPU."""
    values = map(value_of, placeholders)
    types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return next((kind for kind in sorted(types) if kind != "cpu"), "cpu")


_models_in_order: list[weakref.ref[GraphModel]] = []
_models_lock = threading.Lock()


def compile_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., tuple[Any, ...]]:
    """Compile a graph for Dynamo. This function is the package's entry point in the group `torch_dynamo_backends`.

    `options` are `CompileConfig` fields. Returns a plain function, because tools that read Dynamo's cache (depyf)
    expect one.

    Raises `ConfigError` for a bad option, and `CompileError` or a subclass if the graph cannot be compiled, for example
    because gradients are enabled and an input requires them: piecegraph compiles for inference.
    """
    config = CompileConfig.from_options(options)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        raise CompileError(
            "piecegraph compiles for inference, but gradients are enabled and an input or parameter requires them. "
            "Call the model under torch.no_grad() or torch.inference_mode(), or call model.requires_grad_(False)."
        )
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.is_neg():
            raise CompileError(f"the input {node.name} is {NEGATED}. Call .resolve_neg() on it.")
    _refuse_frozen_draws(placeholders, example_inputs)
    sizes = _size_sources(placeholders)
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
            pass_rows = apply_to_graph(gm, passes, FixedInputs(is_split_op), config)
            built = build(
                gm,
                inputs,
                config,
                compiler,
                passes,
                pass_rows,
                is_split_op=is_split_op,
                trace_seconds=0.0,
                on_phase=lambda phase: None,
                bind=dict,  # every placeholder is an argument, so nothing is bound
            )
    finally:
        compiler.close()
    cache.enforce_max_size()
    reason = cache.reason or "under torch.compile, torch traces each time"
    cache_report = replace(built.report.cache, reason=reason, not_stored="; ".join(built.not_saved))
    built = replace(built, report=replace(built.report, cache=cache_report))
    model = GraphModel(built, _Origin(code_being_traced(), example_inputs), sizes)
    with _models_lock:
        _models_in_order.append(weakref.ref(model))

    def run_graph(*args: Any) -> tuple[Any, ...]:
        return model(*args)

    return run_graph


def _refuse_frozen_draws(placeholders: Sequence[fx.Node], example_inputs: Sequence[Any]) -> None:
    """Raise `CompileError` if Python's `random` draws a float for the graph, or the graph draws from an older object.

    Dynamo traces a float as a tensor of the default dtype and passes one of float64, whose bytes a compiled graph would
    read as another number; torch's own Inductor does. From a `random.Random` object that outlives the call it draws the
    same number at each call.
    """
    if drawn := drawn_from_objects():
        raise CompileError(
            f"the graph draws from {', '.join(drawn)}, a random.Random, and torch draws the same number in each call. "
            "Draw before the call and pass the number, or draw with torch.rand."
        )
    for node, value in zip(placeholders, example_inputs, strict=True):
        source = getattr(node.meta.get("grapharg"), "source", None)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and type(source).__name__ == "RandomValueSource":
            raise CompileError(
                f"the graph draws a float from a random.Random ({node.name}), and torch passes it in another dtype "
                "than it traced. Draw before the call and pass the number, or draw with torch.rand."
            )


def graph_models_of(compiled: Callable[..., Any]) -> tuple[GraphModel, ...]:
    """Return the compiled graphs of a module or function that `torch.compile` returned, oldest first.

    Raises `UsageError` for any other object.
    """
    with _models_lock:
        models = [model for ref in _models_in_order if (model := ref()) is not None]
        _models_in_order[:] = [weakref.ref(model) for model in models]
    module, function = compiled_by_torch(compiled)
    if module is None and function is None:
        raise UsageError(
            f"compiled_models takes what torch.compile(..., backend='piecegraph') returned, not {compiled!r}."
        )
    if module is not None:
        return tuple(model for model in models if model._origin.matches_module(module))
    assert function is not None
    return tuple(model for model in models if model._origin.matches_function(function))
