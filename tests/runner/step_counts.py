"""The cost of an engine's steps, counted and not timed."""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.runner.device_memory import staged_write
from piecegraph.runner.device_memory.host_memory.uva import UvaRing


@dataclass
class StepCounts:
    """Of all that runs inside `counted`, on a CPU with `graph_kind="recorded"`: there a replay runs operations again,
    so those inside one are the graph's and count as nothing."""

    graphs: int = 0  # replays
    staged_writes: int = 0  # kernels that bring what the host staged to the rows
    host_bytes: int = 0  # that these kernels read from the host
    writes: Counter[str] = field(default_factory=Counter)  # operations outside graphs that write in place, by name
    views: Counter[str] = field(default_factory=Counter)  # those that compute nothing
    allocations: Counter[str] = field(default_factory=Counter)  # those whose result has memory of its own

    @property
    def launches(self) -> int:
        """The number of launches that a GPU would make."""
        return self.graphs + self.staged_writes + sum(self.writes.values()) + sum(self.allocations.values())


class _Operations(TorchDispatchMode):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._counts = counts
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        name = str(func)
        if func._schema.is_mutable:
            self._counts.writes[name] += 1
            return
        known = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        results = result if isinstance(result, tuple | list) else [result]
        is_new = any(isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in known for one in results)
        (self._counts.allocations if is_new else self._counts.views)[name] += 1


@contextmanager
def counted() -> Iterator[StepCounts]:
    """Count what happens in here."""
    counts = StepCounts()
    operations = _Operations(counts)

    def inside(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted_run(*args: Any, **kwargs: Any) -> Any:
            setattr(counts, name, getattr(counts, name) + 1)
            operations.paused += 1
            try:
                return run(*args, **kwargs)
            finally:
                operations.paused -= 1

        return counted_run

    take = UvaRing.take

    def counted_take(ring: UvaRing, num_words: int) -> Any:
        counts.host_bytes += 4 * num_words
        operations.paused += 1  # making a buffer is the ring's affair: it has a few and keeps them
        try:
            return take(ring, num_words)
        finally:
            operations.paused -= 1

    with (
        patch.object(Graphs, "replay", inside("graphs", Graphs.replay)),
        patch.object(
            staged_write,
            "apply_writes_reference",
            inside("staged_writes", staged_write.apply_writes_reference),
        ),
        patch.object(UvaRing, "take", counted_take),
        operations,
    ):
        yield counts


@dataclass(frozen=True)
class StepMemory:
    """Python's memory of several like steps, in bytes."""

    transient: float  # most that a step held and gave back, median
    kept: float  # more after a step than before it, mean


def step_memory(step: Callable[[], object], num_steps: int) -> StepMemory:
    """Return what `step` allocates in Python, with the garbage collector off."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(4):  # what is replaced by each step is traced from now on
            step()
        transient = []
        first, _ = tracemalloc.get_traced_memory()
        for _ in range(num_steps):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            step()
            transient.append(tracemalloc.get_traced_memory()[1] - before)
        last, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    return StepMemory(transient=statistics.median(transient), kept=(last - first) / num_steps)
