"""The build of a stitched module from a traced graph: normalise, split, compile, stitch."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from piecegraph.cache.store.single_flight import OnWait
from piecegraph.compiler.building.make_plan import NamedInputs, describe_split_calls, make_plan
from piecegraph.compiler.common.report import CacheReport, CompileReport, PassRow, PieceRow, UniquePieceRow
from piecegraph.compiler.common.size_conditions import SizeCondition
from piecegraph.compiler.piece_compilers.compile_static import CompiledStatic, compile_static, tuning_inputs
from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler
from piecegraph.compiler.piece_compilers.forwards import Forwards
from piecegraph.compiler.piece_compilers.graphs_first import GraphsFirst
from piecegraph.compiler.piece_compilers.protocol import CompiledPiece, PieceCompiler
from piecegraph.compiler.piece_compilers.static_piece import (
    Refused,
    StaticPiece,
    static_pieces,
    symbols_by_unique,
)
from piecegraph.compiler.rewriting import dump
from piecegraph.compiler.rewriting.apply_passes import apply_to_pieces, pass_row, report_failure
from piecegraph.compiler.rewriting.expectations import check_expected_matches
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.rewriting.run_pass import MADE_BY, PassOutcome
from piecegraph.compiler.splitting.aliases import resolve_aliases
from piecegraph.compiler.splitting.normalize import IsSplitOp, normalize
from piecegraph.compiler.splitting.piece import UniquePiece, unique_pieces
from piecegraph.compiler.splitting.plan import Plan, SplitCall
from piecegraph.compiler.splitting.split import Call, Piece, segments_of, split
from piecegraph.compiler.splitting.stitch import generate_source
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.passes.matching.graph_pass import GraphPass, Place
from piecegraph.progress import OnPhase, Phase, timed_phase

if TYPE_CHECKING:
    from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler

BeforeCompile = Callable[[tuple[SplitCall, ...]], None]
"""Receives all calls of split ops before any piece is compiled; may raise."""

Bind = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the tensors of the bound placeholders, by their names in `NamedInputs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """A stitched module and everything it was made from. Its functions take the plan's arguments and return a tuple."""

    forwards: Forwards
    plan: Plan
    source: str
    namespace: Mapping[str, Any]  # what the source reads: pieces, ops and bound values by name
    split_calls: tuple[SplitCall, ...]
    read_unique: Callable[[], tuple[UniquePiece, ...]]
    symbols: tuple[frozenset[str], ...]  # size symbols that each unique piece takes
    pieces: tuple[CompiledPiece, ...]  # by unique index
    static_keys: Mapping[tuple[int, int], str | None]  # cache keys of static pieces, by unique index and size
    not_saved: tuple[str, ...]  # why pieces could not be saved
    size_conditions: tuple[SizeCondition, ...]  # over size symbols; they must hold
    report: CompileReport
    assembly: Assembly | None = None  # what compiled pieces are put into later; None: nothing is compiled later


def piece_compiler(config: CompileConfig, cache: CompileCache, on_wait: OnWait | None = None) -> PieceCompiler:
    """Return the piece compiler that `config` names, over `cache`. `on_wait` is that of `CompileCache.flight`."""
    if config.compiler == "eager":
        return EagerPieceCompiler()
    return inductor_compiler(config, cache, on_wait)


def inductor_compiler(
    config: CompileConfig, cache: CompileCache, on_wait: OnWait | None = None, *, is_in_background: bool = False
) -> InductorPieceCompiler:
    """Return the piece compiler that uses Inductor.

    `is_in_background`: a thread will call it while the model runs, so at least one process compiles, at low priority.
    """
    from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler

    return InductorPieceCompiler(
        config.inductor_options,
        config.compile_workers,
        config.compile_sizes_options,
        config.compile_sizes_options_up_to,
        cache,
        on_wait,
        strict=config.strict,
        is_in_background=is_in_background,
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
) -> BuildResult:
    """Compile a traced graph, which is normalised in place.

    Those of `passes` that work on the traced graph have run, and `rows` reports them; the others run here. `bind` is
    called once, while child processes compile pieces if there are any.

    Raises what `split`, passes, the piece compiler and `bind` raise, and what `before_compile` raises for the calls of
    split ops that it receives.
    """
    parts = _split(graph_module, inputs, config, passes, is_split_op, on_phase)
    if before_compile is not None:
        before_compile(parts.calls)
    post_grad = PostGrad.of(passes, config)
    bound = functools.cache(bind)
    compiled, compile_seconds = _compile(parts.unique, compiler, post_grad, bound, on_phase)
    plan, namespace = make_plan(
        graph_module, inputs, parts.constants, bound(), parts.parts, parts.unique, parts.written_inputs
    )
    symbols = symbols_by_unique(parts.unique, parts.pieces)
    wanted, refused = static_pieces(parts.unique, symbols, config.compile_sizes, inputs.call_sizes, parts.conditions)
    assembly = Assembly(
        config=config,
        passes=passes,
        rows=(*rows, *parts.rows),
        parts=parts,
        post_grad=post_grad,
        plan=plan,
        namespace=namespace,
        symbols=symbols,
        static=wanted,
        refused=refused,
        trace_seconds=trace_seconds,
        trace_note=trace_note,
    )
    static = assembly.compile_static(compiler, on_phase)
    return assembly.result(compiler, compiled, static, compile_seconds, on_phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything of a traced graph except its compiled pieces, with which it makes a `BuildResult`.

    Results with other pieces share the plan and the bound tensors.
    """

    config: CompileConfig
    passes: Sequence[GraphPass]
    rows: Sequence[PassRow]  # of the passes on the graph and on pieces
    parts: _SplitGraph
    post_grad: PostGrad
    plan: Plan
    namespace: Mapping[str, Any]
    symbols: tuple[frozenset[str], ...]  # size symbols that each unique piece takes
    static: tuple[StaticPiece, ...]  # the static pieces to compile
    refused: tuple[Refused, ...]
    trace_seconds: float
    trace_note: str

    @property
    def unique(self) -> tuple[UniquePiece, ...]:
        """The unique pieces, after the passes on pieces."""
        return self.parts.unique

    def compile_static(self, compiler: PieceCompiler, on_phase: OnPhase) -> CompiledStatic:
        """Compile the static pieces, and tune those that need it."""
        slots_of = {step.unique: step.inputs for step in reversed(self.plan.piece_steps)}  # of the first that runs it
        return compile_static(
            self.static,
            self.refused,
            compiler,
            self.post_grad,
            make_inputs=lambda piece: tuning_inputs(piece, slots_of[piece.piece.index], self.namespace),
            on_phase=on_phase,
        )

    def result(
        self,
        compiler: PieceCompiler,
        compiled: tuple[CompiledPiece, ...],
        static: CompiledStatic,
        compile_seconds: float,
        on_phase: OnPhase,
    ) -> BuildResult:
        """Stitch these pieces, save those that `compiler` has not saved yet, and return the result.

        Raises `PassFailed` and `PassExpectation` for the passes that ran inside the compiler.
        """
        config, parts = self.config, self.parts
        rows = [*self.rows, *_post_grad_rows(self.passes, parts.unique, compiled, config)]
        start = time.perf_counter()
        on_phase(Phase(name="stitch"))
        source = generate_source(self.plan)
        fallbacks = {} if config.strict else {i: done.fallback for i, done in enumerate(compiled) if done.fallback}
        runs = [done.run for done in compiled]
        forwards = Forwards(source, self.namespace, runs, static.runs, self.symbols, fallbacks)
        stitch_seconds = time.perf_counter() - start
        on_phase(Phase(name="stitch", seconds=stitch_seconds))
        if config.dump_dir is not None:
            dump.write_source(config.dump_dir, source)
        dump.emit_source(source)
        report = replace(
            _report(parts, self.plan, compiler, compiled, static),
            trace_seconds=self.trace_seconds,
            trace_note=self.trace_note,
            compile_seconds=compile_seconds,
            stitch_seconds=stitch_seconds,
            passes=tuple(row for each in self.passes for row in rows if row.name == each.name),
        )
        with timed_phase(on_phase, "store") if compiler.can_save else contextlib.nullcontext():
            not_saved = compiler.save_pending()
        return BuildResult(
            forwards=forwards,
            plan=self.plan,
            source=source,
            namespace=self.namespace,
            split_calls=parts.calls,
            read_unique=lambda: parts.unique,
            symbols=self.symbols,
            pieces=compiled,
            static_keys=static.keys,
            not_saved=not_saved,
            size_conditions=parts.conditions,
            report=report,
            assembly=self if isinstance(compiler, GraphsFirst) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitGraph:
    """A normalised graph that was split at its split ops, after the passes on pieces."""

    parts: Sequence[Piece | Call]  # in execution order
    pieces: Sequence[Piece]
    unique: tuple[UniquePiece, ...]
    calls: tuple[SplitCall, ...]
    constants: Mapping[str, torch.Tensor]  # by placeholder
    conditions: tuple[SizeCondition, ...]
    written_inputs: Sequence[fx.Node]  # placeholders that the graph writes in place
    rows: Sequence[PassRow]  # of the passes on pieces
    seconds: float


def _split(
    graph_module: fx.GraphModule,
    inputs: NamedInputs,
    config: CompileConfig,
    passes: Sequence[GraphPass],
    is_split_op: IsSplitOp,
    on_phase: OnPhase,
) -> _SplitGraph:
    """Normalise and split the graph, and run the passes on pieces."""
    start = time.perf_counter()
    on_phase(Phase(name="split"))
    constants, conditions = normalize(graph_module, is_split_op, frozenset(inputs.size_symbols))
    aliases = resolve_aliases(graph_module, is_split_op, lambda: segments_of(graph_module.graph, is_split_op))
    parts = split(graph_module, is_split_op, aliases.groups)
    pieces = [part for part in parts if isinstance(part, Piece)]
    rows = apply_to_pieces(pieces, passes, config)
    unique = unique_pieces(pieces)
    calls = describe_split_calls(parts)
    seconds = time.perf_counter() - start
    detail = f"{len(pieces)} pieces, {len(unique)} unique, {len(calls)} split ops"
    on_phase(Phase(name="split", seconds=seconds, detail=detail))
    if config.dump_dir is not None:
        dump.write_graphs(config.dump_dir, graph_module, unique)
    dump.emit_graphs(unique)
    return _SplitGraph(
        parts=parts,
        pieces=pieces,
        unique=unique,
        calls=calls,
        constants=constants,
        conditions=conditions,
        written_inputs=aliases.written_inputs,
        rows=rows,
        seconds=seconds,
    )


def _compile(
    unique: Sequence[UniquePiece],
    compiler: PieceCompiler,
    post_grad: PostGrad,
    bind: Callable[[], object],
    on_phase: OnPhase,
) -> tuple[tuple[CompiledPiece, ...], float]:
    """Compile the unique pieces; return them and the seconds. `bind` is called while other processes compile."""
    start = time.perf_counter()

    def notify(done: int, seconds: float | None = None) -> None:
        on_phase(Phase(name="compile", done=done, total=len(unique), seconds=seconds, detail=compiler.name))

    notify(0)
    compiled = compiler.compile(unique, notify, post_grad, meanwhile=bind)
    seconds = time.perf_counter() - start
    notify(len(unique), seconds)
    return compiled, seconds


def _report(
    parts: _SplitGraph,
    plan: Plan,
    compiler: PieceCompiler,
    compiled: Sequence[CompiledPiece],
    static: CompiledStatic,
) -> CompileReport:
    """Return the report without the seconds of trace, compile and stitch, and without the rows of passes."""
    return CompileReport(
        compiler=compiler.name,
        num_pieces=len(parts.pieces),
        num_unique_pieces=len(parts.unique),
        num_split_ops=len(parts.calls),
        trace_seconds=0.0,
        split_seconds=parts.seconds,
        compile_seconds=0.0,
        stitch_seconds=0.0,
        static_compile_seconds=static.seconds,
        static_tune_seconds=sum(row.tune_seconds for row in static.rows),
        passes=(),
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
                eager_reason=done.eager_reason,
                passes={**_made_by_passes(piece), **_matches_inside(done)},
            )
            for piece, done in zip(parts.unique, compiled, strict=True)
        ),
        static_pieces=static.rows,
        cache=CacheReport(state="off", loaded_pieces=sum(done.is_loaded for done in compiled) + static.num_loaded),
    )


def _made_by_passes(piece: UniquePiece) -> dict[str, int]:
    """Return the number of operations in the piece by the pass that made them, without items of tuples."""
    nodes = [node for node in piece.graph_module.graph.nodes if node.target is not operator.getitem]
    return dict(Counter(node.meta[MADE_BY] for node in nodes if MADE_BY in node.meta))


def _post_grad_rows(
    passes: Sequence[GraphPass], unique: Sequence[UniquePiece], compiled: Sequence[CompiledPiece], config: CompileConfig
) -> tuple[PassRow, ...]:
    """Return a report row for each of `passes` that works inside Inductor.

    Such a pass ran once per unique piece; its matches and removed nodes count once for every piece of the model that
    shares the unique piece. Raises `PassFailed` (under `config.strict`) and `PassExpectation`.
    """
    rows = []
    for number, each in enumerate(passes):
        if each.place is not Place.POST_GRAD:
            continue
        outcomes: dict[str, PassOutcome] = {}
        for piece, done in zip(unique, compiled, strict=True):
            found = [inside for inside in done.post_grad if inside.name == each.name]
            for graph, inside in enumerate(found):  # more than one where the piece has graphs of its own
                where = f"unique piece {piece.index}" + (f" graph {graph}" if graph else "")
                outcomes[where] = _times(len(piece.pieces), inside.outcome)
                if config.dump_dir is not None and inside.before:
                    name = f"{number:02d}-{each.name}.{where.replace(' ', '-')}"
                    dump.write_pass(config.dump_dir, name, inside.before, inside.after)
        row = replace(pass_row(each, outcomes), note=_post_grad_note(config.compiler))
        report_failure(row, passes[:number], config)
        rows.append(row)
    check_expected_matches(config.expect, rows)
    return tuple(rows)


def _matches_inside(compiled: CompiledPiece) -> dict[str, int]:
    """Return the matches in one piece, by pass, of the passes that ran inside Inductor."""
    counts: Counter[str] = Counter()
    for inside in compiled.post_grad:
        counts[inside.name] += inside.outcome.matches
    return {name: count for name, count in counts.items() if count}


def _times(pieces: int, outcome: PassOutcome) -> PassOutcome:
    return replace(outcome, matches=outcome.matches * pieces, nodes_removed=outcome.nodes_removed * pieces)


def _post_grad_note(compiler: str) -> str:
    return "" if compiler == "inductor" else f"it did not run: it works inside Inductor, and compiler={compiler!r}"
