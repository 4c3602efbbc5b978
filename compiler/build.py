"""From one traced graph to a stitched module that runs: normalize, split, compile, stitch."""

from __future__ import annotations

import contextlib
import functools
import keyword
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.compiler import dump
from piecegraph.compiler.apply_passes import apply_to_pieces
from piecegraph.compiler.call_targets import MethodCall
from piecegraph.compiler.compile_static import compile_static
from piecegraph.compiler.eager import EagerPieceCompiler
from piecegraph.compiler.forwards import Forwards
from piecegraph.compiler.normalize import IsSplitOp, normalize
from piecegraph.compiler.piece import UniquePiece, unique_pieces
from piecegraph.compiler.piece_compiler import CompiledPiece, PieceCompiler
from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, SplitCall, Step, TensorSpec
from piecegraph.compiler.post_grad import PostGrad
from piecegraph.compiler.post_grad_rows import matches_inside, post_grad_rows
from piecegraph.compiler.report import CacheReport, CompileReport, PassRow, PieceRow, UniquePieceRow
from piecegraph.compiler.run_pass import MADE_BY
from piecegraph.compiler.size_conditions import SizeCondition
from piecegraph.compiler.split import Call, Piece, attribute_of, split
from piecegraph.compiler.split_ops import op_name
from piecegraph.compiler.static_piece import static_pieces, symbols_by_unique
from piecegraph.compiler.stitch import generate_source
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.tune import tuning_inputs
from piecegraph.config import CompileConfig
from piecegraph.passes.graph_pass import GraphPass
from piecegraph.passes.torch_ir import value_of
from piecegraph.progress import OnPhase, Phase, timed_phase

BeforeCompile = Callable[[tuple[SplitCall, ...]], None]

Bind = Callable[[], Mapping[str, torch.Tensor]]
"""Gives the tensors of the placeholders that are bound, by `NamedInputs` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInputs:
    """A graph's placeholders by the names the stitched module uses, in order."""

    names: tuple[str, ...]
    bound: frozenset[str]  # those that are fixed tensors; the others are arguments
    size_symbols: Mapping[str, str]  # symbol -> size name, of the sizes the caller declared
    call_sizes: Mapping[str, str]  # symbol -> name, of every size that is known when the module is called


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A stitched module and all that made it. Its functions take the plan's arguments and return a tuple."""

    forwards: Forwards
    plan: Plan
    source: str
    namespace: Mapping[str, Any]  # what the source reads: pieces, ops and bound values by name
    split_calls: tuple[SplitCall, ...]
    read_unique: Callable[[], tuple[UniquePiece, ...]]
    symbols: tuple[frozenset[str], ...]  # those each unique piece takes
    pieces: tuple[CompiledPiece, ...]  # by unique index
    static_keys: Mapping[tuple[int, int], str | None]  # of entries of static pieces, by unique index and size
    not_kept: tuple[str, ...]  # why pieces could not be saved
    size_conditions: tuple[SizeCondition, ...]  # over size symbols; they must hold
    report: CompileReport


def piece_compiler(config: CompileConfig, cache: CompileCache) -> PieceCompiler:
    """The piece compiler a config names, over `cache`."""
    if config.compiler == "eager":
        return EagerPieceCompiler()
    from piecegraph.compiler.inductor import InductorPieceCompiler

    return InductorPieceCompiler(
        config.inductor_options,
        config.compile_workers,
        config.compile_sizes_options,
        config.compile_sizes_options_up_to,
        cache,
    )


def build(
    graph_module: fx.GraphModule,
    inputs: NamedInputs,
    config: CompileConfig,
    compiler: PieceCompiler,
    passes: Sequence[GraphPass],
    rows: Sequence[PassRow],
    *,
    is_split_op: IsSplitOp,
    trace_seconds: float,
    trace_note: str = "",
    on_phase: OnPhase,
    bind: Bind,
    before_compile: BeforeCompile | None = None,
) -> Built:
    """Compile a traced graph, which is normalized in place. Of `passes`, those of the traced graph have run and
    are told of in `rows`; the others run here. `bind` is called once, while pieces compile if processes of their own
    do that.

    Raises what `split`, passes, the piece compiler and `bind` raise, and whatever `before_compile` raises for the
    split calls it is shown.
    """
    start = time.perf_counter()
    on_phase(Phase(name="split"))
    constants, conditions = normalize(graph_module, is_split_op, frozenset(inputs.size_symbols))
    parts = split(graph_module, is_split_op)
    pieces = [part for part in parts if isinstance(part, Piece)]
    rows = [*rows, *apply_to_pieces(pieces, passes, config)]
    unique = unique_pieces(pieces)
    calls = _split_calls(parts)
    split_seconds = time.perf_counter() - start
    detail = f"{len(pieces)} pieces, {len(unique)} unique, {len(calls)} split ops"
    on_phase(Phase(name="split", seconds=split_seconds, detail=detail))
    if config.dump_dir is not None:
        dump.write_graphs(config.dump_dir, graph_module, unique)
    dump.emit_graphs(unique)
    if before_compile is not None:
        before_compile(calls)

    start = time.perf_counter()
    on_phase(Phase(name="compile", total=len(unique), detail=compiler.name))
    post_grad = PostGrad.of(passes, config)
    bound = functools.cache(bind)
    compiled = compiler.compile(
        unique,
        lambda done: on_phase(Phase(name="compile", done=done, total=len(unique), detail=compiler.name)),
        post_grad,
        meanwhile=bound,
    )
    compile_seconds = time.perf_counter() - start
    on_phase(Phase(name="compile", done=len(unique), total=len(unique), seconds=compile_seconds, detail=compiler.name))

    rows += post_grad_rows(passes, unique, compiled, config)

    plan, namespace = _plan(graph_module, inputs, constants, bound(), parts, unique)
    symbols = symbols_by_unique(unique, pieces)
    wanted, refused = static_pieces(unique, symbols, config.compile_sizes, inputs.call_sizes, conditions)
    slots_of = {step.unique: step.inputs for step in reversed(plan.piece_steps)}  # of the first piece that runs it
    static = compile_static(
        wanted,
        refused,
        compiler,
        post_grad,
        make_inputs=lambda piece: tuning_inputs(piece, slots_of[piece.piece.index], namespace),
        on_phase=on_phase,
    )

    start = time.perf_counter()
    on_phase(Phase(name="stitch"))
    source = generate_source(plan)
    forwards = Forwards(source, namespace, [done.run for done in compiled], static.runs, symbols)
    stitch_seconds = time.perf_counter() - start
    on_phase(Phase(name="stitch", seconds=stitch_seconds))
    if config.dump_dir is not None:
        dump.write_source(config.dump_dir, source)
    dump.emit_source(source)

    report = CompileReport(
        compiler=compiler.name,
        num_pieces=len(pieces),
        num_unique_pieces=len(unique),
        num_split_ops=len(calls),
        trace_seconds=trace_seconds,
        trace_note=trace_note,
        split_seconds=split_seconds,
        compile_seconds=compile_seconds,
        stitch_seconds=stitch_seconds,
        static_compile_seconds=static.seconds,
        static_tune_seconds=sum(row.tune_seconds for row in static.rows),
        passes=tuple(row for each in passes for row in rows if row.name == each.name),
        pieces=tuple(
            PieceRow(index=step.index, unique=step.unique, num_inputs=len(step.inputs), num_outputs=len(step.outputs))
            for step in plan.piece_steps
        ),
        unique_pieces=tuple(
            UniquePieceRow(
                index=piece.index,
                key=piece.key,
                shared_by=len(piece.pieces),
                num_nodes=piece.num_nodes,
                kernels=done.kernels,
                compile_seconds=done.seconds,
                note=done.note,
                passes={**_made_by_passes(piece), **matches_inside(done)},
            )
            for piece, done in zip(unique, compiled, strict=True)
        ),
        static_pieces=static.rows,
        cache=CacheReport(state="off", loaded_pieces=sum(done.is_loaded for done in compiled) + static.num_loaded),
    )
    with timed_phase(on_phase, "store") if compiler.keeps else contextlib.nullcontext():
        not_kept = compiler.keep()
    return Built(
        forwards=forwards,
        plan=plan,
        source=source,
        namespace=namespace,
        split_calls=calls,
        read_unique=lambda: unique,
        symbols=symbols,
        pieces=compiled,
        static_keys=static.keys,
        not_kept=not_kept,
        size_conditions=conditions,
        report=report,
    )


def _made_by_passes(piece: UniquePiece) -> dict[str, int]:
    """Operations in the piece by the pass that made them; items of a tuple do not count."""
    nodes = [node for node in piece.graph_module.graph.nodes if node.target is not operator.getitem]
    return dict(Counter(node.meta[MADE_BY] for node in nodes if MADE_BY in node.meta))


def _split_calls(parts: Sequence[Piece | Call]) -> tuple[SplitCall, ...]:
    nodes = [part.node for part in parts if isinstance(part, Call) and part.is_split_op]
    return tuple(
        SplitCall(
            index=index,
            op=op_name(node.target),
            args=tuple(_described(argument) for argument in node.args),
            kwargs=tuple((name, _described(argument)) for name, argument in node.kwargs.items()),
        )
        for index, node in enumerate(nodes)
    )


def _described(argument: Any) -> Any:
    """An argument of a split op without tensors or nodes."""
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        return TensorSpec(shape, value.dtype, value.device)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    if isinstance(value, tuple | list):
        return type(value)(_described(item) for item in value)
    return value


def _plan(
    graph_module: fx.GraphModule,
    inputs: NamedInputs,
    constants: Mapping[str, torch.Tensor],
    bound_tensors: Mapping[str, torch.Tensor],
    parts: Sequence[Piece | Call],
    unique: Sequence[UniquePiece],
) -> tuple[Plan, dict[str, Any]]:
    """The plan, and the namespace its source needs beside the pieces."""
    names = _Names()
    namespace: dict[str, Any] = {"torch": torch, "device": torch.device}
    arguments: list[Slot] = []
    bound: list[Slot] = []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    given = iter(inputs.names)
    for node in placeholders:
        if node.name in constants:
            tensor, name = constants[node.name], node.name
        else:
            name = next(given)
            if name not in inputs.bound:
                arguments.append(names.of(node, name))
                continue
            tensor = bound_tensors[name]
        slot = names.of(node, name)
        bound.append(slot)
        namespace[slot.name] = tensor

    def slot_of(node: fx.Node) -> Slot:
        if node.op == "get_attr":  # a subgraph that a split op takes as an argument
            subgraph = names.of(node, f"graph_{node.target}")
            if subgraph.name not in namespace:
                namespace[subgraph.name] = attribute_of(graph_module, str(node.target))
                bound.append(subgraph)
            return subgraph
        return names.of(node, node.name)

    unique_of = {index: piece.index for piece in unique for index in piece.pieces}
    steps: list[Step] = []
    for part in parts:
        if isinstance(part, Piece):
            steps.append(
                PieceStep(
                    index=part.index,
                    unique=unique_of[part.index],
                    inputs=tuple(map(slot_of, part.inputs)),
                    outputs=tuple(map(slot_of, part.outputs)),
                )
            )
            continue
        node = part.node
        op = op_name(node.target) if node.op == "call_function" else str(node.target)
        function = "op_" + re.sub(r"\W+", "_", f"method_{op}" if node.op == "call_method" else op)
        namespace[function] = _function(node)
        steps.append(
            CallStep(
                function=function,
                op=op,
                args=tuple(_with_slots(list(node.args), slot_of)),
                kwargs=tuple(_with_slots(dict(node.kwargs), slot_of).items()),
                output=slot_of(node) if node.users else None,
                is_split_op=part.is_split_op,
            )
        )
    output = next(iter(reversed(graph_module.graph.nodes)))
    results = tuple(slot_of(result) if isinstance(result, fx.Node) else result for result in output.args[0])
    plan = Plan(arguments=tuple(arguments), bound=tuple(bound), steps=tuple(steps), results=results)
    return plan, namespace


def _with_slots(arguments: Any, slot_of: Callable[[fx.Node], Slot]) -> Any:
    """Arguments of a call, each node in them replaced by its slot."""
    return fx.map_arg(arguments, slot_of)  # type: ignore[arg-type]  # typed for nodes, works for any value


def _function(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return MethodCall(str(node.target))
    function: Callable[..., Any] = node.target  # type: ignore[assignment]  # call_function: a callable
    return function


class _Names:
    """One Python identifier a node, near the name asked for."""

    def __init__(self) -> None:
        self._slots: dict[fx.Node, Slot] = {}
        self._taken = {"torch", "device", "float", "slice", "forward"}

    def of(self, node: fx.Node, wanted: str) -> Slot:
        if node not in self._slots:
            name = re.sub(r"\W+", "_", wanted).strip("_") or "value"
            if name[0].isdigit() or keyword.iskeyword(name) or re.match(r"(piece|op)_", name):
                name = f"v_{name}"
            unique, number = name, 1
            while unique in self._taken:
                number += 1
                unique = f"{name}__{number}"
            self._taken.add(unique)
            self._slots[node] = Slot(unique)
        return self._slots[node]
