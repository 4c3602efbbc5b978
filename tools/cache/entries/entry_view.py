"""A readable view of an entry: the one place that knows what the compiler puts into entries (docs/cache_format.md).

An entry may have been written by another version, or not be trusted: a value that is missing, or of an unexpected
type, is None or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.entry import Entry

PLAN, PIECE, KERNELS, LIBRARY = "plan", "piece", "kernels", "library"

FOR_A_PLAN = (KERNELS,)
"""Kinds that name the plan they are for, and are part of it."""

PARTS = (PIECE, *FOR_A_PLAN, LIBRARY)
"""Kinds that plans consist of. A library is part of every plan for its processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """Plain values of one entry; those that another kind of entry has are None or empty."""

    kind: str | None
    arch: str | None  # "sm_90 NVIDIA H200", "x86_64 AVX2"
    processor: tuple[tuple[str, str], ...]  # names and values of its facts; empty for an entry for a GPU
    torch: str | None  # version
    compile_seconds: float  # all phases together
    model: str | None = None  # class
    dtype: str | None = None
    num_parameters: int | None = None
    num_pieces: int | None = None
    num_unique_pieces: int | None = None
    sizes: tuple[int, ...] = ()  # static ones: of a plan all, of a piece the one it is for
    passes: Mapping[str, int]  # matches by pass
    pieces: tuple[str, ...]  # keys of the pieces a plan is made of
    of: str | None = None  # of kernels: the key of the plan they are for, or of no entry
    functions: Mapping[str, int]  # of kernels: how many each function has
    eager_pieces: Mapping[str, str] = field(default_factory=dict)
    """Why unique pieces of a plan run eagerly although they were to be compiled, by index."""
    kernels: int | None = None
    nodes: int | None = None

    @property
    def title(self) -> str | None:
        """The title of the entry's model, as in `"LlamaForCausalLM 134.5M bfloat16"`."""
        if self.model is None:
            return None
        count = [f"{self.num_parameters / 1e6:.1f}M"] if self.num_parameters is not None else []
        return " ".join([self.model, *count, *([self.dtype] if self.dtype else [])])


def view(entry: Entry) -> EntryView:
    """Return the readable view of `entry`."""
    notes, factors = entry.notes, entry.factors
    return EntryView(
        kind=_text(factors.get("kind")),
        arch=_arch(_mapping(factors.get("machine"))),
        processor=_processor(_mapping(factors.get("machine"))),
        torch=_text(entry.versions.get("torch")),
        compile_seconds=float(sum(entry.seconds.values())),
        model=_text(notes.get("model")),
        dtype=_text(notes.get("dtype")),
        num_parameters=_count(notes.get("num_parameters")),
        num_pieces=_count(notes.get("num_pieces")),
        num_unique_pieces=_count(notes.get("num_unique_pieces")),
        sizes=_sizes(notes),
        passes=_counts(notes.get("passes")),
        pieces=tuple(dict.fromkeys(key for key in _list(notes.get("pieces")) if is_digest(key))),
        of=_text(notes.get("of")) or _text(factors.get("of")),
        functions=_counts(notes.get("functions")),
        eager_pieces={index: why for index, why in _mapping(notes.get("eager_pieces")).items() if isinstance(why, str)},
        kernels=_count(notes.get("kernels")),
        nodes=_count(notes.get("nodes")),
    )


DEEPEST = 64
"""The most levels of lists and mappings; entries that the compiler writes have 12."""


def is_too_deep(entry: Entry) -> bool:
    """Return whether factors, notes or unknown fields are nested deeper than `DEEPEST`.

    A recursive walk of such an entry would exceed the recursion limit.
    """
    level: list[Any] = [entry.factors, entry.notes, entry.unknown]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def is_of_the_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether factors are of one graph, one class of model, or one plan's kernels.

    Such entries differ in how they were compiled.
    """
    return _subject(left) == _subject(right)


def _subject(factors: Mapping[str, Any]) -> tuple[Any, ...]:
    return factors.get("graph"), _classes(_mapping(factors.get("model"))), factors.get("of")


def _classes(model: Mapping[str, Any]) -> list[Any]:
    """Return the classes of the compiled module and of its direct children.

    The module itself may be a wrapper, the same for all models.
    """
    below = {
        path: _mapping(row).get("class") for path, row in _mapping(model.get("modules")).items() if "." not in path
    }
    return [model.get("class"), *(below[path] for path in sorted(below))]


def _sizes(notes: Mapping[str, Any]) -> tuple[int, ...]:
    found = [*_list(notes.get("sizes")), notes.get("size")]
    return tuple(size for size in found if _count(size) is not None)


def _arch(machine: Mapping[str, Any]) -> str | None:
    """Return the architecture of the GPU, where there is one."""
    gpu, cpu = _mapping(machine.get("gpu")), _mapping(machine.get("cpu"))
    capability = _text(gpu.get("capability"))
    sm = f"sm_{capability.replace('.', '')}" if capability else None
    parts = (sm, gpu.get("name")) if gpu else (cpu.get("machine"), cpu.get("isa"))
    return " ".join(part for part in parts if isinstance(part, str) and part) or None


def _processor(machine: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if machine.get("device") != "cpu":
        return ()
    facts = _mapping(machine.get("cpu")).items()
    return tuple(sorted((name, value) for name, value in facts if isinstance(value, str)))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


_MOST = 1 << 63
"""A bound of numbers; a greater one is not a count, and may be too large for a float."""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST else None


def _counts(value: Any) -> dict[str, int]:
    return {name: count for name, count in _mapping(value).items() if _count(count) is not None}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
