"""The compile of static pieces, and their tuning: the first run, in which Inductor measures kernel configurations.

Without tuning, Inductor would measure in the first warm-up of a capture or in a request. Pieces are tuned one after the
other while all compile processes are idle, so that other work does not disturb the measurements. The results are stored
beside the kernels, so a later start measures almost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.compiler.common.piece_errors import shortened
from piecegraph.compiler.common.report import StaticPieceRow
from piecegraph.compiler.common.symbolic_sizes import size_at
from piecegraph.compiler.piece_compilers.protocol import NO_PASSES, CompiledPiece, PieceCompiler, RunPiece
from piecegraph.compiler.piece_compilers.static_piece import Refused, StaticPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import Slot
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.passes.matching.effects import is_pure
from piecegraph.progress import OnPhase, Phase


@dataclass(frozen=True, slots=True)
class CompiledStatic:
    """The compiled static pieces of `compile_sizes`."""

    runs: Mapping[tuple[int, int], RunPiece]  # by unique index and size
    keys: Mapping[tuple[int, int], str | None]  # cache keys, by unique index and size
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
    """Compile `pieces`, and run those that need tuning on `make_inputs(piece)`, one after the other.

    A failure is not raised: a piece that fails stays dynamic at its size, as one in `refused` does, and its row in the
    report has the reason.
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
                note=failure or outcome.note or _pass_errors(outcome),
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


def _pass_errors(compiled: CompiledPiece) -> str:
    """Return the errors of passes inside Inductor on a static piece; "" if none failed."""
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


def needs_tuning(static: StaticPiece) -> bool:
    """Return whether the first run of a static piece measures kernels: whether the piece runs on a GPU."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in static.piece.examples)


def tuning_inputs(static: StaticPiece, slots: Sequence[Slot], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return inputs for the piece: the model's own tensors where `bound` has them, otherwise zeros.

    `slots` name the piece's inputs. A piece that may write to its inputs receives copies.
    """
    writes = not all(map(is_pure, _operations(static.piece)))
    values: list[Any] = []
    for slot, example in zip(slots, static.piece.examples, strict=True):
        if not isinstance(example, torch.Tensor):
            values.append(size_at(example, static.size))
            continue
        tensor = bound.get(slot.name)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            values.append(tensor.detach().clone() if writes else tensor)
        else:
            shape, stride = (
                [size_at(size, static.size) for size in sizes] for sizes in (example.shape, example.stride())
            )
            values.append(torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device).zero_())
    return tuple(values)


def _operations(piece: UniquePiece) -> list[torch.fx.Node]:
    return [node for node in piece.graph_module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
