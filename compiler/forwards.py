"""The stitched function for any combination of sizes: the same source, static pieces where they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.static_piece import choose_static
from piecegraph.compiler.stitch import Forward, compile_source, load_code


class Forwards:
    """Owns the pieces of one model, dynamic and static, and a stitched function per choice among them.

    `static` is by unique index and size; `symbols` are those each unique piece takes. Sizes are given
    as symbol to number, and a choice costs nothing where there are no static pieces.
    """

    def __init__(
        self,
        source: str,
        namespace: Mapping[str, Any],
        dynamic: Sequence[RunPiece],
        static: Mapping[tuple[int, int], RunPiece],
        symbols: Sequence[frozenset[str]],
    ) -> None:
        self._code = compile_source(source)
        self._namespace = namespace
        self._dynamic = tuple(dynamic)
        self._static = dict(static)
        self._symbols = tuple(symbols)
        self._all_dynamic = load_code(self._code, self._with(self._dynamic))
        self._loaded: dict[tuple[int | None, ...], Forward] = {(None,) * len(self._dynamic): self._all_dynamic}

    @property
    def is_one(self) -> bool:
        """There are no static pieces: sizes make no difference."""
        return not self._static

    def pieces(self, sizes: Mapping[str, int]) -> tuple[RunPiece, ...]:
        """What runs at these sizes, by unique index."""
        return self._pieces(choose_static(self._symbols, self._static, sizes))

    def at(self, sizes: Mapping[str, int]) -> Forward:
        """The stitched function that runs `pieces(sizes)`."""
        if not self._static:
            return self._all_dynamic
        chosen = choose_static(self._symbols, self._static, sizes)
        forward = self._loaded.get(chosen)
        if forward is None:
            forward = self._loaded[chosen] = load_code(self._code, self._with(self._pieces(chosen)))
        return forward

    def _pieces(self, chosen: Sequence[int | None]) -> tuple[RunPiece, ...]:
        return tuple(
            run if size is None else self._static[index, size]
            for index, (run, size) in enumerate(zip(self._dynamic, chosen, strict=True))
        )

    def _with(self, pieces: Sequence[RunPiece]) -> dict[str, Any]:
        return {**self._namespace, **{f"piece_{index}": run for index, run in enumerate(pieces)}}
