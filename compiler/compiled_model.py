"""A compiled model: called like the module it was made from, for any size of the declared dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.apply_passes import apply_passes
from piecegraph.compiler.build import BeforeCompile, Built, NamedInputs, build, piece_compiler
from piecegraph.compiler.call_spec import CallSpec, ResultSpec
from piecegraph.compiler.dynamic_dims import DynamicDims
from piecegraph.compiler.expectations import check_expected_run
from piecegraph.compiler.guards import GuardAudit
from piecegraph.compiler.kernels_ahead import launches_ahead
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.plan import Plan, SplitCall
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.stitch import Forward
from piecegraph.compiler.trace import ArgumentInput, BoundInput, GraphInput, SizeInput, Traced, trace
from piecegraph.config import CompileConfig
from piecegraph.errors import CompileError, InputMismatch, NotCompiled
from piecegraph.passes.pipeline import pipeline
from piecegraph.progress import OnPhase, Phase

if TYPE_CHECKING:
    from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
    from piecegraph.compiler.graphs.capture import MakeInputs
    from piecegraph.compiler.graphs.graphs import Graphs

WEIGHT_CHECK_INTERVAL = 1024
"""Calls between two checks that the module's parameters and buffers are still the bound tensors."""

SIZES_REMEMBERED = 4096
"""Combinations of sizes whose relations were checked and whose pieces are chosen; past that many, anew."""


class CompiledModel:
    """What `piecegraph.compile` returns.

    Calling it runs the compiled pieces, for inference (no gradients), with any sizes of the declared
    dims; nothing is ever traced or compiled again. An argument that does not fit what was traced
    raises `InputMismatch`. Without example inputs, the first call traces and compiles.

    The module must be in its final state: parameters are bound as they are. Changing one's values in
    place is seen; replacing one raises `InputMismatch` at the next check (first call, and every
    1024th).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: CompileConfig,
        dynamic_dims: DynamicDims,
        on_phase: OnPhase | None = None,
        before_compile: BeforeCompile | None = None,
    ) -> None:
        self._module: torch.nn.Module | None = module  # None once closed
        self._config = config
        self._dynamic_dims = dict(dynamic_dims)
        self._on_phase: OnPhase = on_phase or (lambda phase: None)
        self._before_compile = before_compile
        self._ready: _Ready | None = None
        self._closed = False

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace with these example arguments and compile. Their tensors' values are not read."""
        self._refuse_closed()
        if self._ready is not None:
            raise CompileError("this CompiledModel is compiled already; make another with piecegraph.compile.")
        assert self._module is not None, "only a closed model has none"
        compiler = piece_compiler(self._config)
        try:
            compiler.start()
            self._on_phase(Phase(name="trace"))
            traced = trace(self._module, args, kwargs, self._dynamic_dims)
            self._on_phase(Phase(name="trace", seconds=traced.seconds))
            weights = _Weights(self._module, traced)  # as they are in the module, before passes merge some
            device_type = _device_type(traced.inputs)
            passes = pipeline(self._config.passes, device_type)
            check_expected_run(self._config.expect, (each.name for each in passes))
            is_split_op = split_op_matcher(traced.graph_module.graph, self._config.split_ops)
            traced, rows = apply_passes(traced, passes, is_split_op, self._config)
            launches = launches_ahead(traced.graph_module.graph, is_split_op, _bound_placeholders(traced))
            built = build(
                traced.graph_module,
                _named_inputs(traced),
                self._config,
                compiler,
                passes,
                rows,
                is_split_op=is_split_op,
                trace_seconds=traced.seconds,
                on_phase=self._on_phase,
                before_compile=self._before_compile,
                launches=launches,
            )
        finally:
            compiler.close()
        self._ready = _Ready(traced, built, weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, kwargs)
            assert self._ready is not None
        return self._ready.run(args, kwargs)

    def report(self) -> CompileReport:
        """Pieces, unique pieces, seconds per phase. Raises `NotCompiled` before the first trace."""
        return self._compiled().built.report

    @property
    def source(self) -> str:
        """The stitched module's source."""
        return self._compiled().built.source

    @property
    def plan(self) -> Plan:
        """The stitched module as data."""
        return self._compiled().built.plan

    @property
    def unique_pieces(self) -> tuple[UniquePiece, ...]:
        """The graph of each unique piece, as passes left it. To read; the compiled pieces are made of them."""
        return self._compiled().built.unique

    @property
    def split_calls(self) -> tuple[SplitCall, ...]:
        """Every call of a split op, in order."""
        return self._compiled().built.split_calls

    @property
    def guards(self) -> GuardAudit:
        """What Dynamo guarded on, and why each guard needs no check per call. Printable."""
        return self._compiled().guards

    def capture(self, descriptors: Sequence[BatchDescriptor], make_inputs: MakeInputs, **options: Any) -> Graphs:
        """Short for `piecegraph.capture(self, descriptors, make_inputs, ...)`."""
        from piecegraph.compiler.graphs.capture import capture

        return capture(self, descriptors, make_inputs, **options)

    def parts(self, args: Sequence[Any]) -> Parts:
        """The stitched module taken apart over these arguments, for whoever replays it step by step.

        Traces and compiles first if that has not happened. Raises `InputMismatch` as a call would.
        """
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, {})
        return self._compiled().parts(args)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter, buffer and constant the pieces read, by name."""
        return self._compiled().bound_tensors()

    def close(self) -> None:
        """Let go of the module, its weights and the compiled pieces; further calls raise `CompileError`.
        Harmless when repeated."""
        self._closed = True
        self._ready = None
        self._module = None

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _compiled(self) -> _Ready:
        self._refuse_closed()
        if self._ready is None:
            raise NotCompiled(
                "nothing is compiled yet: piecegraph.compile was given no example_inputs, so tracing waits for the "
                "first call. "
                "Call the model once, or pass example_inputs."
            )
        return self._ready

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CompileError("this CompiledModel is closed.")


@dataclass(frozen=True, slots=True)
class Parts:
    """A plan, what its steps run, and the values of its arguments."""

    plan: Plan
    pieces: tuple[RunPiece, ...]  # by unique index; static ones where these arguments' sizes have them
    namespace: Mapping[str, Any]
    arguments: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]  # the plan's results to the model's result


class _Ready:
    """A traced and built model: binds a call's arguments, runs the stitched module, builds the result."""

    def __init__(self, traced: Traced, built: Built, weights: _Weights) -> None:
        self.built = built
        self.guards = traced.guards
        self._call_spec: CallSpec = traced.call_spec
        self._result_spec: ResultSpec = traced.result_spec
        self._size_symbols = traced.size_symbols
        self._inputs = [i for i in traced.inputs if not isinstance(i, BoundInput)]
        self._weights = weights
        self._forward_at: dict[tuple[tuple[str, int], ...], Forward] = {}  # for sizes known to be right
        self._calls = 0

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values, sizes = self._call_spec.bind(args, kwargs)
        key = tuple(sizes.items())
        forward = self._forward_at.get(key)
        if forward is None:
            self._check_sizes(sizes)
            if len(self._forward_at) >= SIZES_REMEMBERED:
                self._forward_at.clear()
            forward = self._forward_at[key] = self.built.forwards.at(self._by_symbol(sizes))
        if self._calls % WEIGHT_CHECK_INTERVAL == 0:
            self._weights.check()
        self._calls += 1
        with torch.no_grad():
            outputs = forward(*self._arguments(values, sizes))
        return self._result_spec.build(outputs, values)

    def parts(self, args: Sequence[Any]) -> Parts:
        values, sizes = self._call_spec.bind(args, {})
        self._check_sizes(sizes)
        return Parts(
            plan=self.built.plan,
            pieces=self.built.forwards.pieces(self._by_symbol(sizes)),
            namespace=self.built.namespace,
            arguments=self._arguments(values, sizes),
            build=lambda results: self._result_spec.build(results, values),
        )

    def _by_symbol(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {symbol: sizes[name] for symbol, name in self._size_symbols.items()}

    def _arguments(self, values: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return tuple(sizes[i.name] if isinstance(i, SizeInput) else values[i.leaf] for i in self._inputs)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        named = [(slot.name, self.built.namespace[slot.name]) for slot in self.built.plan.bound]
        return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise `InputMismatch` if these sizes break a relation the trace relies on."""
        for assertion in self.built.size_assertions:
            values = {symbol: sizes[self._size_symbols[str(symbol)]] for symbol in assertion.free_symbols}
            if assertion.subs(values) == False:  # noqa: E712  (sympy's own false)
                named = {symbol: self._size_symbols[str(symbol)] for symbol in assertion.free_symbols}
                text = str(assertion)
                for symbol, name in named.items():
                    text = text.replace(str(symbol), name)
                raise InputMismatch(f"sizes {dict(sizes)} do not satisfy {text}, on which the model's code relies.")


class _Weights:
    """The parameters and buffers bound at compile time, and where in the module they were."""

    def __init__(self, module: torch.nn.Module, traced: Traced) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, str]] = []
        for bound in traced.inputs:
            if isinstance(bound, BoundInput) and bound.kind in ("parameter", "buffer"):
                path, _, name = bound.name.rpartition(".")
                owner = module.get_submodule(path)
                registry: Any = owner._parameters if bound.kind == "parameter" else owner._buffers
                self._places.append((registry, name, bound.tensor, bound.name))

    def check(self) -> None:
        """Raise `InputMismatch` if one was replaced by another tensor."""
        for registry, name, tensor, path in self._places:
            if registry.get(name) is not tensor:
                raise InputMismatch(
                    f"{path} was replaced after the model was compiled, and the compiled pieces still read the old "
                    "tensor. "
                    "Change its values in place (tensor.copy_), or compile again."
                )


def _device_type(inputs: Sequence[GraphInput]) -> str:
    """Where the module's tensors are."""
    return next((bound.tensor.device.type for bound in inputs if isinstance(bound, BoundInput)), "cpu")


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
