"""What a long phase tells whoever watches: plain values, passed to a function the caller gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One thing that happened in a phase: it began, moved on, or (with `seconds`) ended."""

    name: str  # "convert", "load", "trace", "split", "compile", "stitch", "kv_cache", ...
    done: int = 0  # of `total`, e.g. unique pieces compiled
    total: int = 0  # 0: not counted
    seconds: float | None = None  # set once, when the phase ended
    detail: str = ""  # e.g. "61 pieces, 3 unique"


OnPhase = Callable[[Phase], None]
