"""From static pieces to functions that run them: compiled, then run once each where that measures kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.compiler.errors_of_pieces import shortened
from piecegraph.compiler.piece_compiler import NO_PASSES, CompiledPiece, PieceCompiler, RunPiece
from piecegraph.compiler.post_grad import PostGrad
from piecegraph.compiler.report import StaticPieceRow
from piecegraph.compiler.static_piece import Refused, StaticPiece
from piecegraph.compiler.tune import needs_tuning
from piecegraph.progress import OnPhase, Phase


@dataclass(frozen=True, slots=True)
class CompiledStatic:
    """What `compile_sizes` came to."""

    runs: Mapping[tuple[int, int], RunPiece]  # by unique index and size
    keys: Mapping[tuple[int, int], str | None]  # of their entries in the cache
    rows: tuple[StaticPieceRow, ...]
    seconds: float
    num_loaded: int  # from the cache


def compile_static(
    pieces: Sequence[StaticPiece],
    refused: Sequence[Refused],
    compiler: PieceCompiler,
    post_grad: PostGrad = NO_PASSES,
    *,
    make_inputs: Callable[[StaticPiece], Sequence[Any]],
    on_phase: OnPhase,
) -> CompiledStatic:
    """Compile `pieces` and run those that measure kernels on `make_inputs(piece)`, one after the other.

    Nothing here stops a start: a piece that fails stays dynamic at that size, as a refused one does, and
    its row has the reason.
    """
    start = time.perf_counter()
    outcomes = _compile(pieces, compiler, post_grad, on_phase)
    runs: dict[tuple[int, int], RunPiece] = {}
    keys: dict[tuple[int, int], str | None] = {}
    rows = [_unused(no.unique, no.size, "", no.reason) for no in refused]
    to_tune = sum(_is_to_tune(piece, outcome) for piece, outcome in zip(pieces, outcomes, strict=True))
    tuned = 0
    tune_start = time.perf_counter()
    for piece, outcome in zip(pieces, outcomes, strict=True):
        if isinstance(outcome, str):
            rows.append(_unused(piece.piece.index, piece.size, piece.key, outcome))
            continue
        begin = time.perf_counter()
        failure = None
        if _is_to_tune(piece, outcome):
            on_phase(Phase(name="tune_sizes", done=tuned, total=to_tune, detail=f"size {piece.size}"))
            try:
                compiler.tune(outcome.run, make_inputs(piece))
            except Exception as error:
                failure = f"its first run failed: {shortened(f'{type(error).__name__}: {error}')}"
            tuned += 1
        if failure is None:
            runs[piece.piece.index, piece.size] = outcome.run
            keys[piece.piece.index, piece.size] = outcome.key
        rows.append(
            StaticPieceRow(
                unique=piece.piece.index,
                size=piece.size,
                key=piece.key,
                is_used=failure is None,
                kernels=outcome.kernels,
                compile_seconds=outcome.seconds,
                tune_seconds=time.perf_counter() - begin,
                note=failure or outcome.note or _undone(outcome),
            )
        )
    if to_tune:
        on_phase(Phase(name="tune_sizes", done=to_tune, total=to_tune, seconds=time.perf_counter() - tune_start))
    rows.sort(key=lambda row: (row.size, row.unique))
    num_loaded = sum(not isinstance(outcome, str) and outcome.is_loaded for outcome in outcomes)
    return CompiledStatic(runs, keys, tuple(rows), time.perf_counter() - start, num_loaded)


def _is_to_tune(piece: StaticPiece, outcome: CompiledPiece | str) -> bool:
    return not isinstance(outcome, str) and not outcome.is_loaded and needs_tuning(piece)


def _compile(
    pieces: Sequence[StaticPiece], compiler: PieceCompiler, post_grad: PostGrad, on_phase: OnPhase
) -> tuple[CompiledPiece | str, ...]:
    if not pieces:
        return ()
    start = time.perf_counter()
    detail = f"{compiler.name}, size {', '.join(map(str, dict.fromkeys(piece.size for piece in pieces)))}"

    def at(done: int, seconds: float | None = None) -> None:
        on_phase(Phase(name="compile_sizes", done=done, total=len(pieces), seconds=seconds, detail=detail))

    at(0)
    outcomes = compiler.compile_static(pieces, at, post_grad)
    at(len(pieces), time.perf_counter() - start)
    return outcomes


def _undone(compiled: CompiledPiece) -> str:
    """Passes inside Inductor that failed on a piece; what they do to its dynamic twin is in their rows."""
    failed = [
        f"pass {each.name!r} was undone: {each.outcome.error}" for each in compiled.post_grad if each.outcome.error
    ]
    return "; ".join(failed)


def _unused(unique: int, size: int, key: str, note: str) -> StaticPieceRow:
    return StaticPieceRow(
        unique=unique,
        size=size,
        key=key,
        is_used=False,
        kernels=None,
        compile_seconds=0.0,
        tune_seconds=0.0,
        note=note,
    )
