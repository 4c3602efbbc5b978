"""The interface between the compiler and a compiler of single pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from piecegraph.compiler.piece_compilers.static_piece import StaticPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad, PostGradOutcome
from piecegraph.compiler.splitting.piece import UniquePiece

NO_PASSES = PostGrad()

RunPiece = Callable[..., Sequence[Any]]
"""Takes the inputs in the order of the piece's placeholders; returns the sequence of its outputs."""


def run_boxed(run: RunPiece, inputs: list[Any]) -> Sequence[Any]:
    """Return `run(*inputs)` and empty the list `inputs`.

    A piece with a boxed calling convention (`run.boxed`) releases each input after its last use.
    """
    boxed = getattr(run, "boxed", None)
    if boxed is not None:
        return boxed(inputs)  # type: ignore[no-any-return]
    outputs = run(*inputs)
    inputs.clear()
    return outputs


@dataclass(frozen=True, slots=True)
class Fallback:
    """The replacement of a compiled piece that fails its own checks."""

    graph: Callable[[], RunPiece]  # makes the function that runs the piece as its graph
    writes: tuple[int, ...]  # positions of the inputs that the piece changes in place


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPiece:
    """A unique piece that can run, with facts of its compile."""

    run: RunPiece
    seconds: float  # wall time of this piece's compile, load included
    kernels: int | None = None  # generated kernels it launches beside library calls; None: not known
    note: str = ""  # why a slower path was taken
    post_grad: tuple[PostGradOutcome, ...] = ()  # outcomes of passes inside Inductor
    key: str | None = (
        None  # of its cache entry, which exists now or after `save_pending`; None: the piece is not stored
    )
    is_loaded: bool = False  # whether it came from the cache, compiled and tuned
    eager_reason: str = ""  # why it runs as its graph although it was to be compiled
    fallback: Fallback | None = None  # its replacement if it fails its own checks


OnPiece = Callable[[int], None]
"""Called with the number of pieces that are ready."""


class PieceCompiler(Protocol):
    """A compiler of unique pieces. `start` may be called early, to overlap work with the trace of the model."""

    name: str

    def start(self) -> None:
        """Start the work that does not depend on the pieces."""

    def compile(
        self,
        pieces: Sequence[UniquePiece],
        on_piece: OnPiece,
        post_grad: PostGrad = NO_PASSES,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[CompiledPiece, ...]:
        """Return one compiled piece for each of `pieces`, in order.

        Where other processes compile, `meanwhile` is called as soon as they have begun; otherwise it is not called. A
        piece that cannot be compiled runs as its graph; under `strict`, `PieceCompileFailed` is raised instead, naming
        the piece. Raises what `meanwhile` raises.
        """

    def compile_static(
        self, pieces: Sequence[StaticPiece], on_piece: OnPiece, post_grad: PostGrad = NO_PASSES
    ) -> tuple[CompiledPiece | str, ...]:
        """Return for each piece a compiled piece that takes the dynamic piece's inputs, or why there is none."""

    def tune(self, run: RunPiece, inputs: Sequence[Any]) -> None:
        """Run a static piece for the first time, alone on the device, which may measure and choose kernels."""

    @property
    def can_save(self) -> bool:
        """Whether `save_pending` may have something to save."""

    def save_pending(self) -> tuple[str, ...]:
        """Save compiled pieces that have a key, with the results of tuning; return why pieces could not be saved."""

    def close(self) -> None:
        """End what `start` began. Idempotent."""
