"""The protocol between the compiler and whatever compiles one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from piecegraph.compiler.piece import UniquePiece

RunPiece = Callable[..., Sequence[Any]]
"""Inputs in the order of the piece's placeholders to a sequence of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """A unique piece that can run, and what it took."""

    run: RunPiece
    seconds: float  # wall time of this piece's compile, load included
    kernels: int | None = None  # generated kernels it launches beside library calls; None: not known
    note: str = ""  # a slower path that was taken, and why


OnPiece = Callable[[int], None]
"""Called with the number of unique pieces that are ready."""


class PieceCompiler(Protocol):
    """Compiles unique pieces. `start` may be called early, to have work done while the model is traced."""

    name: str

    def start(self) -> None:
        """Begin whatever can begin before the pieces are known."""

    def compile(self, pieces: Sequence[UniquePiece], on_piece: OnPiece) -> tuple[CompiledPiece, ...]:
        """One compiled piece each, in order. Raises `PieceCompileFailed`, naming the piece."""

    def close(self) -> None:
        """End whatever `start` began; harmless when repeated."""
