"""A piece compiler whose pieces run as their graphs at first, and are compiled by another compiler later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler
from piecegraph.compiler.piece_compilers.protocol import NO_PASSES, CompiledPiece, OnPiece, RunPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.splitting.passthrough import build_graph_runner
from piecegraph.compiler.splitting.piece import UniquePiece

NOTE = "runs as its graph until it is compiled"
"""The note in the report on a piece that is not compiled yet."""


class GraphsFirst(EagerPieceCompiler):
    """A piece compiler that returns each piece as its graph, so that the model can run at once.

    `name` is that of the compiler that compiles the pieces later, and `start` and `prepare` do what can be done for it
    now. Nothing is compiled for static sizes, tuned or stored here.
    """

    note = NOTE
    why_not_static = "it is compiled later"

    def __init__(
        self,
        name: str,
        *,
        start: Callable[[], object] = lambda: None,
        prepare: Callable[[Sequence[UniquePiece], PostGrad], object] = lambda pieces, post_grad: None,
    ) -> None:
        self.name = name
        self._start = start
        self._prepare = prepare

    def start(self) -> None:
        """Start the work that does not depend on the pieces."""
        self._start()

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        """Return each piece as its graph. Raises what `prepare` raises."""
        self._prepare(pieces, post_grad)
        return super().compile(pieces, lambda num_ready: None, post_grad)  # none of them is compiled yet

    def _run_of(self, piece: UniquePiece) -> RunPiece:
        return build_graph_runner(piece.graph_module)
