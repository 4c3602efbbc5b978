"""Progress reports of long phases: plain values, passed to a function that the caller gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STEP_KERNELS = "step_kernels"
CONCURRENT_PHASES = (STEP_KERNELS,)
"""The phases that run in a thread beside the others, whose seconds include theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """An event of a phase: the phase began, advanced, or (with `seconds`) ended."""

    name: str  # "config", "load", "trace", "compile", "kv_cache", "capture", ...
    done: int = 0  # of `total`, e.g. unique pieces compiled
    total: int = 0  # 0: not counted
    seconds: float | None = None  # set once, when the phase ended
    detail: str = ""  # e.g. "61 pieces, 3 unique"


OnPhase = Callable[[Phase], None]


@contextmanager
def timed_phase(on_phase: OnPhase | None, name: str) -> Iterator[None]:
    """Report a phase when it has ended, with its seconds. A phase that raises is not reported."""
    started = time.perf_counter()
    yield
    if on_phase is not None:
        on_phase(Phase(name=name, seconds=time.perf_counter() - started))
