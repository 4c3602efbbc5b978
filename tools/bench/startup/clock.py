"""Attribute the time of a start to named spans: each moment belongs to the innermost one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from piecegraph.progress import CONCURRENT_PHASES, Phase


class Span(NamedTuple):
    """Something that ran, on the clock that all processes of a machine share (`time.monotonic`)."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Shares:
    """An interval divided among spans: `by_name` and `unnamed` add up to it."""

    by_name: dict[str, float]  # seconds, in the order the names first ran
    unnamed_after: dict[str, float]  # seconds that are nobody's, by whose moment came before ("" where none did)

    @property
    def unnamed(self) -> float:
        return sum(self.unnamed_after.values())


def share_out(spans: Sequence[Span], begin: float, end: float) -> Shares:
    """Attribute each moment from `begin` to `end` to the span that began last of those that run at that moment.

    So what runs inside a phase is not counted as the phase's, and no moment counts twice. Spans of threads that run
    beside the main one get no moment, because otherwise the unnamed time could not be known.
    """
    spans = [span for span in spans if span.name not in CONCURRENT_PHASES]
    edges = sorted({begin, end, *(edge for span in spans for edge in (span.begin, span.end) if begin < edge < end)})
    by_name = {span.name: 0.0 for span in sorted(spans, key=lambda span: span.begin)}
    unnamed_after: dict[str, float] = {}
    last = ""
    for left, right in pairwise(edges):
        running = [span for span in spans if span.begin <= left and span.end >= right]
        if running:
            last = max(running, key=lambda span: (span.begin, -span.end)).name
            by_name[last] += right - left
        else:
            unnamed_after[last] = unnamed_after.get(last, 0.0) + right - left
    return Shares({name: seconds for name, seconds in by_name.items() if seconds > 0}, unnamed_after)


class PhaseSpans:
    """An `OnPhase` that remembers each phase that ended as a span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __call__(self, phase: Phase) -> None:
        if phase.seconds is not None:
            now = time.monotonic()
            self.spans.append(Span(phase.name, now - phase.seconds, now))


GROUPS = {
    "torch": ("torch", "torchgen", "functorch", "triton"),
    "transformers": ("transformers", "tokenizers", "safetensors", "huggingface_hub"),
    "piecegraph": ("piecegraph",),
}
"""Top-level packages by the group that their imports count for. Other packages count for their importer."""

_GROUP_OF = {package: group for group, packages in GROUPS.items() for package in packages}


class ImportSpans:
    """Imports of the main thread as spans, `"import torch"` and so on, wherever they happen.

    Each span is without what it imports of another group. A finder at the head of `sys.meta_path` while `measured`, in
    front of the finders that are there.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._groups: list[str] = []  # of the imports that run now, innermost last
        self._since = 0.0  # when the innermost one became that

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the imports inside this block."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what the other finders find, with a loader whose time is measured."""
        if threading.current_thread() is not threading.main_thread():
            return None
        group = _GROUP_OF.get(name.partition(".")[0])
        with self._running(group):
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader | SourcelessFileLoader | ExtensionFileLoader):
            for verb in ("create_module", "exec_module"):
                setattr(spec.loader, verb, self._timed(getattr(spec.loader, verb), group))  # of this module's alone
        return spec

    def _timed(self, run: Callable[[Any], Any], group: str | None) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            with self._running(group):
                return run(argument)

        return timed

    @contextmanager
    def _running(self, group: str | None) -> Iterator[None]:
        outer = self._groups[-1] if self._groups else None
        inner = group or outer or "other"
        self._switch(outer, inner)
        self._groups.append(inner)
        try:
            yield
        finally:
            self._groups.pop()
            self._switch(inner, outer)

    def _switch(self, old: str | None, new: str | None) -> None:
        if old == new:
            return
        now = time.monotonic()
        if old is not None:
            self.spans.append(Span(f"import {old}", self._since, now))
        self._since = now
