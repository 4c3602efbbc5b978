"""The stitched function for any combination of sizes.

Every combination runs the same source. It runs static pieces where they fit the sizes, and the graph of a piece that
failed its own checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from piecegraph.compiler.common.piece_errors import eager_note
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.piece_compilers.first_run import WatchedPiece
from piecegraph.compiler.piece_compilers.protocol import Fallback, RunPiece
from piecegraph.compiler.piece_compilers.static_piece import choose_static
from piecegraph.compiler.splitting.stitch import Forward, compile_source, load_code

logger = logging.getLogger(__name__)

OnFailure = Callable[[int, int | None, str], None]
"""Called with the unique index of a piece that failed its own checks, its static size or None, and the reason."""


class Forwards:
    """The owner of a model's pieces, dynamic and static, and of a stitched function per choice among them.

    `static` maps (unique index, size) to a static piece; `symbols` holds the size symbols that each unique piece takes.
    Methods take sizes as a mapping of symbol to number; without static pieces a choice costs nothing. `fallbacks`, by
    unique index, replace a dynamic piece that fails its own checks while it is watched; a static piece that fails is
    replaced by the dynamic piece. `on_failure` is called for each such failure.
    """

    def __init__(
        self,
        source: str,
        namespace: Mapping[str, Any],
        dynamic: Sequence[RunPiece],
        static: Mapping[tuple[int, int], RunPiece],
        symbols: Sequence[frozenset[str]],
        fallbacks: Mapping[int, Fallback] | None = None,
    ) -> None:
        self.on_failure: OnFailure = lambda unique, size, reason: None
        self._fallbacks = dict(fallbacks or {})
        self._failures: dict[tuple[int, int | None], str] = {}
        self._code = compile_source(source)
        self._namespace = namespace
        self._dynamic = tuple(dynamic)
        self._static = dict(static)
        self._symbols = tuple(symbols)
        self._all_dynamic = load_code(self._code, self._with(self._dynamic))
        self._loaded: dict[tuple[int | None, ...], Forward] = {(None,) * len(self._dynamic): self._all_dynamic}

    @property
    def needs_sizes(self) -> bool:
        """Return whether the sizes of a call matter: they choose static pieces and end the watch over dynamic ones."""
        return bool(self._static or self._fallbacks)

    def pieces(self, sizes: Mapping[str, int]) -> tuple[RunPiece, ...]:
        """Return the pieces that run at these sizes, by unique index; those with a fallback are watched."""
        return self._watched(choose_static(self._symbols, self._static, sizes))

    def at(self, sizes: Mapping[str, int]) -> Forward:
        """Return the stitched function for these sizes, without watching its pieces."""
        if not self._static:
            return self._all_dynamic
        chosen = choose_static(self._symbols, self._static, sizes)
        forward = self._loaded.get(chosen)
        if forward is None:
            forward = self._loaded[chosen] = load_code(self._code, self._with(self._pieces(chosen)))
        return forward

    def watched_at(self, sizes: Mapping[str, int]) -> Forward:
        """Return the stitched function for the first call at these sizes, which watches its pieces."""
        if not self._fallbacks:
            return self.at(sizes)
        return load_code(self._code, self._with(self.pieces(sizes)))

    def put(self, index: int, run: RunPiece, fallback: Fallback | None) -> None:
        """Run unique piece `index` as `run` from now on. `fallback` replaces it if it fails its own checks."""
        if fallback is not None:
            self._fallbacks[index] = fallback
        self._use((*self._dynamic[:index], run, *self._dynamic[index + 1 :]))

    @property
    def num_failures(self) -> int:
        """The number of pieces that failed their own checks so far."""
        return len(self._failures)

    def with_failures(self, report: CompileReport) -> CompileReport:
        """Return `report` with the pieces that have failed their own checks since `report` was made."""
        if not self._failures:
            return report
        return mark_failures(report, self._failures)

    def _watched(self, chosen: Sequence[int | None]) -> tuple[RunPiece, ...]:
        return tuple(
            WatchedPiece(run, self._fallbacks[index], partial(self._replace, index, size))
            if index in self._fallbacks and ((index, size) not in self._failures)
            else run
            for index, (run, size) in enumerate(zip(self._pieces(chosen), chosen, strict=True))
        )

    def _replace(self, index: int, size: int | None, reason: str) -> None:
        """Run a failed dynamic piece as its graph from now on, or stop using a failed static piece."""
        if (index, size) in self._failures:
            return
        self._failures[index, size] = reason
        where = "" if size is None else f" at size {size}"
        instead = "runs eagerly" if size is None else "is replaced by the dynamic piece"
        logger.warning("unique piece %d%s %s: %s (strict=True makes this an error)", index, where, instead, reason)
        if size is None:
            graph = self._fallbacks[index].graph()
            self._use((*self._dynamic[:index], graph, *self._dynamic[index + 1 :]))
        else:
            del self._static[index, size]
            self._use(self._dynamic)
        self.on_failure(index, size, reason)

    def _use(self, dynamic: tuple[RunPiece, ...]) -> None:
        """Make the stitched functions again, with these dynamic pieces."""
        self._dynamic = dynamic
        self._all_dynamic = load_code(self._code, self._with(self._dynamic))
        self._loaded = {(None,) * len(self._dynamic): self._all_dynamic}

    def _pieces(self, chosen: Sequence[int | None]) -> tuple[RunPiece, ...]:
        return tuple(
            run if size is None else self._static[index, size]
            for index, (run, size) in enumerate(zip(self._dynamic, chosen, strict=True))
        )

    def _with(self, pieces: Sequence[RunPiece]) -> dict[str, Any]:
        return {**self._namespace, **{f"piece_{index}": run for index, run in enumerate(pieces)}}


def mark_failures(report: CompileReport, failures: Mapping[tuple[int, int | None], str]) -> CompileReport:
    """Return `report` with `failures`, the reason by unique index and static size (None: the dynamic piece)."""
    unique = [
        row
        if (reason := failures.get((row.index, None))) is None
        else replace(row, kernels=None, note=eager_note(reason), eager_reason=reason)
        for row in report.unique_pieces
    ]
    static = [
        row
        if (reason := failures.get((row.unique, row.size))) is None
        else replace(row, is_used=False, kernels=None, note=reason)
        for row in report.static_pieces
    ]
    return replace(report, unique_pieces=tuple(unique), static_pieces=tuple(static))
