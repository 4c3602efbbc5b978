"""What a long phase tells whoever watches: plain values, passed to a function the caller gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

READ_AHEAD, STEP_KERNELS = BESIDE = ("read_ahead", "step_kernels")
"""Phases that a thread has beside the others: their seconds are part of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One thing that happened in a phase: it began, moved on, or (with `seconds`) ended."""

    name: str  # "config", "load", "trace", "compile", "kv_cache", "capture", ...
    done: int = 0  # of `total`, e.g. unique pieces compiled
    total: int = 0  # 0: not counted
    seconds: float | None = None  # set once, when the phase ended
    detail: str = ""  # e.g. "61 pieces, 3 unique"


OnPhase = Callable[[Phase], None]


@contextmanager
def timed_phase(on_phase: OnPhase | None, name: str) -> Iterator[None]:
    """Tell of a phase once it has ended, with the seconds this was entered; of one that raises, nothing."""
    started = time.perf_counter()
    yield
    if on_phase is not None:
        on_phase(Phase(name=name, seconds=time.perf_counter() - started))
