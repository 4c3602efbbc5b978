"""The Inductor piece compiler: each unique piece through `standalone_compile`, in processes of its own.

A process compiles one piece at a time and writes the artifact to a file; this process loads it. The
kernels themselves stay in Inductor's and Triton's caches under piecegraph's cache folder, so a later
start finds them. A piece that only this process can compile is compiled here, and the note says why.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piecegraph.compiler import torch_compat
from piecegraph.compiler.compile_pool import CompileJob, CompilePool
from piecegraph.compiler.errors_of_pieces import piece_failed
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import CompiledPiece, OnPiece, RunPiece
from piecegraph.compiler.piece_format import NotExpressible, dump_piece, load_piece, only_known_here
from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.paths import cache_root

MOST_WORKERS = 4
"""Processes started unless the caller says otherwise: a decoder has at most 4 unique pieces (5 with MoE)."""


class InductorPieceCompiler:
    """Compiles with `workers` processes (None: one a core, at most `MOST_WORKERS`; 0 or 1: in this process)."""

    name = "inductor"

    def __init__(self, options: Mapping[str, Any], workers: int | None) -> None:
        self.options = dict(options)
        self.workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS) if workers is None else workers
        self.cache_dir = cache_root() / "inductor"
        self._pool: CompilePool | None = None

    def start(self) -> None:
        """Start the worker processes, so that their imports overlap with tracing."""
        if self.workers > 1 and self._pool is None and self._options_are_data():
            self._pool = CompilePool(self.workers, self.cache_dir)

    def compile(self, pieces: Sequence[UniquePiece], on_piece: OnPiece) -> tuple[CompiledPiece, ...]:
        unknown = torch_compat.unknown_inductor_options(self.options)
        if unknown:
            hint = did_you_mean(unknown[0], torch_compat.inductor_option_names())
            raise ConfigError(f"inductor_options has {unknown[0]!r}, which is no torch._inductor.config field.{hint}")
        texts, notes = self._as_data(pieces)
        elsewhere = [piece for piece in pieces if not notes[piece.index]] if self._pool is not None else []
        here = [piece for piece in pieces if piece not in elsewhere]
        compiled: dict[int, CompiledPiece] = {}

        def ready(index: int, piece: CompiledPiece) -> None:
            compiled[index] = piece
            on_piece(len(compiled))

        with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
            jobs = [self._job(piece, texts[piece.index], Path(folder)) for piece in elsewhere]
            if self._pool is not None and jobs:
                self._pool.submit(jobs)
            for piece in here:
                ready(piece.index, self._compile_here(piece, texts.get(piece.index), notes[piece.index]))
            if self._pool is not None and jobs:
                for result in self._pool.results():
                    begin = time.perf_counter()
                    run = self._load(result.job.artifact)
                    seconds = result.seconds + time.perf_counter() - begin
                    ready(result.job.index, CompiledPiece(run=run, seconds=seconds, kernels=result.kernels))
        return tuple(compiled[piece.index] for piece in pieces)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _as_data(self, pieces: Sequence[UniquePiece]) -> tuple[dict[int, str], dict[int, str]]:
        """Pieces by index as data another process can compile, and for each a note: why it cannot, or nothing."""
        texts: dict[int, str] = {}
        notes: dict[int, str] = {}
        for piece in pieces:
            private = only_known_here(piece.graph_module)
            if not self._options_are_data():
                notes[piece.index] = "compiled in this process: inductor_options hold an object"
            elif private is not None:
                notes[piece.index] = f"compiled in this process: only it knows {private}"
            else:
                notes[piece.index] = ""
            try:
                texts[piece.index] = dump_piece(piece.graph_module)
            except NotExpressible as reason:
                notes[piece.index] = f"compiled in this process: {reason}"
        return texts, notes

    def _options_are_data(self) -> bool:
        try:
            json.dumps(self.options)
        except TypeError:
            return False
        return True

    def _job(self, piece: UniquePiece, text: str, folder: Path) -> CompileJob:
        graph = folder / f"piece_{piece.index}.json"
        graph.write_text(text)
        artifact = folder / f"piece_{piece.index}.artifact"
        return CompileJob(
            index=piece.index,
            graph=graph,
            artifact=artifact,
            weight=piece.num_nodes,
            options=self.options,
            settings=torch_compat.process_settings(),
        )

    def _compile_here(self, piece: UniquePiece, text: str | None, note: str) -> CompiledPiece:
        begin = time.perf_counter()
        graph_module, examples = load_piece(text) if text is not None else (piece.graph_module, piece.examples)
        with torch_compat.inductor_cache_dir(self.cache_dir):
            kernels = torch_compat.generated_kernels()
            try:
                run: RunPiece = torch_compat.standalone_compile(graph_module, examples, self.options)
            except Exception as error:
                raise piece_failed(piece.index, piece.num_nodes, f"{type(error).__name__}: {error}") from error
            kernels = torch_compat.generated_kernels() - kernels
        return CompiledPiece(run=run, seconds=time.perf_counter() - begin, kernels=kernels, note=note)

    def _load(self, artifact: Path) -> RunPiece:
        with torch_compat.inductor_cache_dir(self.cache_dir):
            run: RunPiece = torch_compat.load_artifact(artifact)
        return run
