"""The eager piece compiler: a piece runs as the graph it is. For debugging, comparison and fast starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import NO_PASSES, CompiledPiece, OnPiece, RunPiece
from piecegraph.compiler.post_grad import PostGrad
from piecegraph.compiler.static_piece import StaticPiece


class EagerPieceCompiler:
    """Bitwise what the module computes: the same torch calls in the same order."""

    name = "eager"

    def start(self) -> None:
        pass

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        compiled = []
        for number, piece in enumerate(pieces, start=1):
            begin = time.perf_counter()
            piece.graph_module.recompile()
            compiled.append(CompiledPiece(run=piece.graph_module.forward, seconds=time.perf_counter() - begin))
            on_piece(number)
        return tuple(compiled)

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        return ("compile_sizes has no effect with compiler='eager'",) * len(pieces)

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        pass

    @property
    def keeps(self) -> bool:
        return False

    def keep(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass
