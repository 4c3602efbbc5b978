"""The protocol between the compiler and whatever compiles one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.post_grad import PostGrad, PostGradOutcome
from piecegraph.compiler.static_piece import StaticPiece

NO_PASSES = PostGrad()

RunPiece = Callable[..., Sequence[Any]]
"""Inputs in the order of the piece's placeholders to a sequence of its outputs."""


def run_boxed(run: RunPiece, inputs: list[Any]) -> Sequence[Any]:
    """`run(*inputs)` of a list that is emptied: a piece that has a form for it (`boxed`) lets go of each input after
    its last use."""
    boxed = getattr(run, "boxed", None)
    if boxed is not None:
        return boxed(inputs)  # type: ignore[no-any-return]
    outputs = run(*inputs)
    inputs.clear()
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """A unique piece that can run, and what it took."""

    run: RunPiece
    seconds: float  # wall time of this piece's compile, load included
    kernels: int | None = None  # generated kernels it launches beside library calls; None: not known
    note: str = ""  # a slower path that was taken, and why
    post_grad: tuple[PostGradOutcome, ...] = ()  # of passes inside it
    key: str | None = None  # of its entry in the cache, there now or once `keep` was called; None: it gets none
    is_loaded: bool = False  # from the cache: it was compiled, and tuned, before


OnPiece = Callable[[int], None]
"""Called with the number of pieces that are ready."""


class PieceCompiler(Protocol):
    """Compiles unique pieces. `start` may be called early, to have work done while the model is traced."""

    name: str

    def start(self) -> None:
        """Begin whatever can begin before the pieces are known."""

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        """One compiled piece each, in order. Where other processes compile, `meanwhile` is called here as soon as they
        have begun; it is not called otherwise. Raises `PieceCompileFailed`, naming the piece, and what it raises."""

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        """One each, in order, or why there is none. Each takes the inputs of its dynamic piece."""

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        """Run a static piece for the first time, alone on the device, with whatever that sets off."""

    @property
    def keeps(self) -> bool:
        """`keep` may have something to save."""

    def keep(self) -> tuple[str, ...]:
        """Save what was compiled and has a key, with what tuning found; why some of it could not be."""

    def close(self) -> None:
        """End whatever `start` began; harmless when repeated."""
