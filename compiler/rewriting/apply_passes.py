"""Run the passes over the traced graph, in order, then those over pieces. Each pass gives a row of the report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from piecegraph.compiler.common.report import PassRow
from piecegraph.compiler.rewriting import dump
from piecegraph.compiler.rewriting.expectations import check_expected_matches
from piecegraph.compiler.rewriting.graph_snapshot import graph_text
from piecegraph.compiler.rewriting.method_calls import name_methods
from piecegraph.compiler.rewriting.pass_contexts import FixedInputs, GraphContext, TracedContext
from piecegraph.compiler.rewriting.run_pass import PassOutcome, run_pass
from piecegraph.compiler.splitting.normalize import IsSplitOp
from piecegraph.compiler.splitting.split import Piece
from piecegraph.compiler.tracing.trace import Traced
from piecegraph.config import CompileConfig
from piecegraph.errors import PassFailed
from piecegraph.passes.matching.graph_pass import GraphPass, Place

logger = logging.getLogger(__name__)


def apply_passes(
    traced: Traced, passes: Sequence[GraphPass], is_split_op: IsSplitOp, config: CompileConfig
) -> tuple[Traced, tuple[PassRow, ...]]:
    """Apply the passes that work on a traced graph. Return the new trace, and a row for each pass.

    Rewrites the graph in place and mutates the module: weights that were concatenated become views of the whole, so
    memory does not grow and `state_dict` is unchanged. Raises `PassFailed` (if `config.strict`) and
    `PassExpectation`, both before the module is changed.
    """
    context = TracedContext(traced.graph_module.graph, traced.inputs, is_split_op)
    rows = apply_to_graph(traced.graph_module, passes, context, config)
    return replace(traced, inputs=context.bound_inputs()), rows


def apply_to_graph(
    graph_module: fx.GraphModule, passes: Sequence[GraphPass], context: GraphContext, config: CompileConfig
) -> tuple[PassRow, ...]:
    """Apply the passes that work on a traced graph, in order, and return a row each. Raises as `apply_passes` does."""
    name_methods(graph_module.graph)
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
    """Apply the passes that work on pieces, each over all pieces, in place, and return a row each.

    Raises as `apply_passes` does.
    """
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
    """Return the report row of a pass. `outcomes` are by place, "" for the whole graph."""
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
        raise PassFailed(f"{found}. Fix it, leave it out of passes, or run without it (strict=False).") from cause
    logger.warning("%s. It was undone there, and the model runs without it (strict=True makes this an error).", found)


def _show(name: str, outcome: PassOutcome, graph: fx.Graph, config: CompileConfig) -> None:
    """Write the graph before and after a pass that matched to `dump_dir` and to torch's structured trace."""
    before = outcome.before
    if before is None:
        return
    if config.dump_dir is not None:
        dump.write_pass(config.dump_dir, name, before.text(), graph_text(graph))
    dump.emit_pass(name, before.text, lambda: graph_text(graph))
