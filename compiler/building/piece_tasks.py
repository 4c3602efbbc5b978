"""`PieceTask`, a piece that Inductor is to compile, its form for a child process, and the facts of its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.compiler.piece_compilers.first_run import written_positions
from piecegraph.compiler.piece_compilers.static_piece import StaticPiece
from piecegraph.compiler.rewriting.post_grad import PostGradOutcome
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.piece_format import NotExpressible, dump_piece, find_process_local_function
from piecegraph.compiler.store.piece_store import PieceFacts
from piecegraph.compiler.torch_compat.process_settings import process_settings
from piecegraph.compiler.workers.pool import CompileJob


@dataclass(frozen=True, slots=True)
class PieceFailure:
    """The failure to compile a piece."""

    reason: str
    cause: Exception | None = None


@dataclass(slots=True)
class PieceTask:
    """A piece to compile, dynamic or at one size."""

    piece: UniquePiece
    options: Mapping[str, Any]
    static: StaticPiece | None = None
    factors: dict[str, Any] | None = None  # of its cache key; None: it has no key

    @property
    def sizes(self) -> dict[str, int] | None:
        """The numbers that a static piece has for the symbols of the dynamic one, by name; None: it is dynamic."""
        return self.static.sizes if self.static is not None else None

    def facts(
        self,
        kernels: int | None,
        note: str,
        post_grad: tuple[PostGradOutcome, ...],
        text: str | None,
        seconds: float,
        eager_reason: str = "",
    ) -> PieceFacts:
        """Return the facts of the compiled piece. A static piece takes no sizes."""
        positions = self.static.tensor_positions if self.static is not None else None
        return PieceFacts(
            nodes=self.piece.num_nodes,
            kernels=kernels,
            note=note,
            takes=None if positions is None or len(positions) == len(self.piece.examples) else positions,
            post_grad=post_grad,
            graph=self.piece.text,
            graph_data=text,
            seconds={"compile": seconds},
            writes=written_positions(self.piece.graph_module.graph),
            eager_reason=eager_reason,
        )


def as_texts(tasks: Mapping[int, PieceTask]) -> tuple[dict[int, str], dict[int, str]]:
    """Return tasks, by number, as text for another process, and for each why that is impossible, or ""."""
    texts: dict[int, str] = {}
    notes: dict[int, str] = {}
    by_piece: dict[int, str] = {}
    for index, task in tasks.items():
        private = find_process_local_function(task.piece.graph_module)
        if not is_plain_data(task.options):
            notes[index] = "compiled in this process: the options hold an object"
        elif private is not None:
            notes[index] = f"compiled in this process: only it knows {private}"
        else:
            notes[index] = ""
        try:
            if task.piece.index not in by_piece:
                by_piece[task.piece.index] = dump_piece(task.piece.graph_module)
            texts[index] = by_piece[task.piece.index]
        except NotExpressible as reason:
            notes[index] = f"compiled in this process: {reason}"
    return texts, notes


def is_plain_data(options: Mapping[str, Any]) -> bool:
    """Return whether options can be sent to another process as JSON."""
    try:
        json.dumps(options)
    except TypeError:
        return False
    return True


def job_of(index: int, task: PieceTask, text: str, folder: Path, post_grad: Mapping[str, Any]) -> CompileJob:
    """Return the job of a child process that compiles the task `text`, and write its graph to `folder`."""
    graph = folder / f"{index}.json"
    graph.write_text(text)
    return CompileJob(
        index=index,
        graph=graph,
        artifact=folder / f"{index}.artifact",
        weight=task.piece.num_nodes,
        options=dict(task.options),
        settings=process_settings(),
        sizes=task.sizes,
        post_grad=post_grad,
    )
