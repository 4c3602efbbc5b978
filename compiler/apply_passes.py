"""Run passes: those of the traced graph, in order, then those of pieces. What became of each is a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from piecegraph.compiler import dump
from piecegraph.compiler.expectations import check_expected_matches
from piecegraph.compiler.graph_snapshot import graph_text
from piecegraph.compiler.normalize import IsSplitOp
from piecegraph.compiler.pass_contexts import FixedInputs, GraphContext, TracedContext
from piecegraph.compiler.report import PassRow
from piecegraph.compiler.run_pass import PassOutcome, run_pass
from piecegraph.compiler.split import Piece
from piecegraph.compiler.trace import Traced
from piecegraph.config import CompileConfig
from piecegraph.errors import PassFailed
from piecegraph.passes.graph_pass import GraphPass, Place

logger = logging.getLogger(__name__)


def apply_passes(
    traced: Traced, passes: Sequence[GraphPass], is_split_op: IsSplitOp, config: CompileConfig
) -> tuple[Traced, tuple[PassRow, ...]]:
    """`traced` with those of `passes` applied that work on it, its graph rewritten in place, and a row for each.

    Mutates the module: weights that were concatenated become views of the whole, so memory does not
    grow and `state_dict` is what it was. Raises `PassFailed` (if `config.strict`) and `PassExpectation`,
    both before it touches the module.
    """
    context = TracedContext(traced.graph_module.graph, traced.inputs, is_split_op)
    rows = apply_to_graph(traced.graph_module, passes, context, config)
    return replace(traced, inputs=context.bound_inputs()), rows


def apply_to_graph(
    graph_module: fx.GraphModule, passes: Sequence[GraphPass], context: GraphContext, config: CompileConfig
) -> tuple[PassRow, ...]:
    """Those of `passes` that work on a traced graph, in order: a row each. Raises as `apply_passes`."""
    rows = []
    for number, each in enumerate(passes):
        if each.place is not Place.TRACED:
            continue
        outcome = run_pass(each, graph_module.graph, context)
        _show(f"{number:02d}-{each.name}", outcome, graph_module.graph, config)
        row = pass_row(each, {"": outcome})
        report_failure(row, passes[:number], config, outcome.cause)
        rows.append(row)
    check_expected_matches(config.expect, rows)
    graph_module.recompile()
    return tuple(rows)


def apply_to_pieces(pieces: Sequence[Piece], passes: Sequence[GraphPass], config: CompileConfig) -> tuple[PassRow, ...]:
    """Those of `passes` that work on pieces, each over all pieces, in place: a row each. Raises as `apply_passes`."""
    rows = []
    for number, each in enumerate(passes):
        if each.place is not Place.PIECE:
            continue
        outcomes = {}
        for piece in pieces:
            outcome = outcomes[f"piece {piece.index}"] = run_pass(each, piece.graph_module.graph, FixedInputs())
            _show(f"{number:02d}-{each.name}.piece-{piece.index}", outcome, piece.graph_module.graph, config)
        row = pass_row(each, outcomes)
        cause = next((outcome.cause for outcome in outcomes.values() if outcome.cause is not None), None)
        report_failure(row, passes[:number], config, cause)
        rows.append(row)
    check_expected_matches(config.expect, rows)
    for piece in pieces if rows else ():
        piece.graph_module.recompile()
    return tuple(rows)


def pass_row(graph_pass: GraphPass, outcomes: Mapping[str, PassOutcome]) -> PassRow:
    """What became of a pass wherever it ran; `outcomes` by where that was, "" for the whole graph."""
    errors = [
        f"{where}: {outcome.error}" if where else outcome.error for where, outcome in outcomes.items() if outcome.error
    ]
    more = f" (and on {len(errors) - 1} pieces more)" if len(errors) > 1 else ""
    return PassRow(
        name=graph_pass.name,
        place=graph_pass.place.value,
        matches=sum(outcome.matches for outcome in outcomes.values()),
        misses=tuple(
            replace(miss, node=f"{where}: {miss.node}") if where else miss
            for where, outcome in outcomes.items()
            for miss in outcome.misses
        ),
        nodes_removed=sum(outcome.nodes_removed for outcome in outcomes.values()),
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        error=errors[0] + more if errors else "",
    )


def report_failure(
    row: PassRow, ran_before: Sequence[GraphPass], config: CompileConfig, cause: Exception | None = None
) -> None:
    """Log a pass that was undone, or raise `PassFailed` if `config.strict`."""
    if not row.error:
        return
    before = ", ".join(each.name for each in ran_before) or "none"
    found = f"pass {row.name!r} failed: {row.error}; passes before it: {before}"
    if config.strict:
        raise PassFailed(f"{found}. Mend it, leave it out of passes, or run without it (strict=False).") from cause
    logger.warning("%s. It was undone there, and the model runs without it (strict=True makes this an error).", found)


def _show(name: str, outcome: PassOutcome, graph: fx.Graph, config: CompileConfig) -> None:
    """The graph before and after a pass that matched, to whoever looks."""
    before = outcome.before
    if before is None:
        return
    if config.dump_dir is not None:
        dump.write_pass(config.dump_dir, name, before.text(), graph_text(graph))
    dump.emit_pass(name, before.text, lambda: graph_text(graph))
