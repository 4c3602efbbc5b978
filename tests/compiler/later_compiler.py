"""A piece compiler for tests of models that run before they are compiled: the test says when each piece is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler
from piecegraph.compiler.piece_compilers.protocol import NO_PASSES, CompiledPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.splitting.passthrough import build_graph_runner
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.workers.pool import CompileInterrupted


class LaterCompiler(EagerPieceCompiler):
    """Makes piece after piece, each once `release` was called for it; its pieces count their calls."""

    name = "inductor"

    def __init__(self, fails_at: int | None = None) -> None:
        """`fails_at`: the number of the piece at which the compile raises."""
        self.fails_at = fails_at
        self.calls: dict[int, int] = {}
        self.is_interrupted = False
        self.is_closed = False
        self._released = threading.Semaphore(0)

    def release(self, number: int = 1) -> None:
        """Let that many more pieces become ready."""
        self._released.release(number)

    def prepare(self, pieces: Sequence[UniquePiece], post_grad: PostGrad) -> None:
        """Do nothing."""

    def compile_each(
        self, pieces: Sequence[UniquePiece], post_grad: PostGrad = NO_PASSES, *, meanwhile: Callable[[], object] = int
    ) -> Iterator[tuple[int, CompiledPiece]]:
        """Yield each piece as a counted graph."""
        for index, piece in enumerate(pieces):
            self._released.acquire()
            if self.is_interrupted:
                raise CompileInterrupted
            if index == self.fails_at:
                raise RuntimeError("the compiler is broken")
            yield index, CompiledPiece(run=self._counted(index, piece), seconds=0.5)

    def interrupt(self) -> None:
        """End a wait."""
        self.is_interrupted = True
        self._released.release()

    def close(self) -> None:
        """Remember that it was called."""
        self.is_closed = True

    def _counted(self, index: int, piece: UniquePiece) -> Callable[..., Sequence[Any]]:
        run = build_graph_runner(piece.graph_module)
        self.calls[index] = 0

        def counted(*inputs: Any) -> Sequence[Any]:
            self.calls[index] += 1
            return run(*inputs)

        return counted
