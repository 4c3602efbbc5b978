"""The eager piece compiler, which runs each piece as its graph: for debugging, comparison and fast starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from piecegraph.compiler.piece_compilers.protocol import NO_PASSES, CompiledPiece, OnPiece, RunPiece
from piecegraph.compiler.piece_compilers.static_piece import StaticPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.splitting.piece import UniquePiece


class EagerPieceCompiler:
    """A piece compiler whose pieces make the module's torch calls in the same order, bitwise equal to the module."""

    name = "eager"
    note = ""  # of each piece in the report
    why_not_static = "compile_sizes has no effect with compiler='eager'"

    def start(self) -> None:
        """Do nothing."""

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        """Return each piece as its graph."""
        compiled = []
        for number, piece in enumerate(pieces, start=1):
            begin = time.perf_counter()
            run = self._run_of(piece)
            compiled.append(CompiledPiece(run=run, seconds=time.perf_counter() - begin, note=self.note))
            on_piece(number)
        return tuple(compiled)

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        """Return, for each piece, the reason why it stays dynamic."""
        return (self.why_not_static,) * len(pieces)

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        """Do nothing."""

    @property
    def can_save(self) -> bool:
        """False: graphs are not stored."""
        return False

    def save_pending(self) -> tuple[str, ...]:
        """Return no reasons: there is nothing to save."""
        return ()

    def close(self) -> None:
        """Do nothing."""

    def _run_of(self, piece: UniquePiece) -> RunPiece:
        """Return the function that runs the piece."""
        piece.graph_module.recompile()
        return piece.graph_module.forward
