"""What passes inside Inductor did to a model, as rows of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from piecegraph.compiler import dump
from piecegraph.compiler.apply_passes import pass_row, report_failure
from piecegraph.compiler.expectations import check_expected_matches
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import CompiledPiece
from piecegraph.compiler.report import PassRow
from piecegraph.compiler.run_pass import PassOutcome
from piecegraph.config import CompileConfig
from piecegraph.passes.graph_pass import GraphPass, Place


def post_grad_rows(
    passes: Sequence[GraphPass], unique: Sequence[UniquePiece], compiled: Sequence[CompiledPiece], config: CompileConfig
) -> tuple[PassRow, ...]:
    """A row for each of `passes` that works inside Inductor. It ran once a unique piece; matches and nodes count
    once for each piece of the model that is run by it. Raises `PassFailed` (if `config.strict`), `PassExpectation`."""
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
        row = replace(pass_row(each, outcomes), note=_note(config.compiler))
        report_failure(row, passes[:number], config)
        rows.append(row)
    check_expected_matches(config.expect, rows)
    return tuple(rows)


def matches_inside(compiled: CompiledPiece) -> dict[str, int]:
    """Matches in one piece of the passes that ran inside Inductor, by pass."""
    counts: Counter[str] = Counter()
    for inside in compiled.post_grad:
        counts[inside.name] += inside.outcome.matches
    return {name: count for name, count in counts.items() if count}


def _times(pieces: int, outcome: PassOutcome) -> PassOutcome:
    return replace(outcome, matches=outcome.matches * pieces, nodes_removed=outcome.nodes_removed * pieces)


def _note(compiler: str) -> str:
    return "" if compiler == "inductor" else f"it did not run: it works inside Inductor, and compiler={compiler!r}"
