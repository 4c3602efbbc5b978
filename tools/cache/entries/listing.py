"""The entries of a cache, and which pieces and kernels belong to which plans."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from piecegraph.cache.disk.counters import Totals
from piecegraph.cache.store.store import Listed, Store
from piecegraph.tools.cache.entries.entry_view import FOR_A_PLAN, LIBRARY, PLAN, EntryView, view

MISSING_PIECES = "pieces missing"
"""The state of a good plan one of whose pieces is missing or cannot be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An entry, and what the cache knows of its use."""

    listed: Listed
    view: EntryView | None  # None for a file that cannot be made out
    hits: int
    state: str  # "complete", or what keeps it from being loaded
    detail: str

    @property
    def key(self) -> str:
        return self.listed.key

    @property
    def is_loadable(self) -> bool:
        return self.listed.file.problem is None and self.state != MISSING_PIECES

    @property
    def created(self) -> float | None:
        """The time at which the entry was made, in seconds since 1970."""
        entry = self.listed.file.entry
        return float(entry.created) if entry is not None else None


@dataclass(frozen=True)
class Listing:
    """Every entry of the cache, last used first."""

    rows: tuple[Row, ...]

    @cached_property
    def by_key(self) -> Mapping[str, Row]:
        return {row.key: row for row in self.rows}

    @cached_property
    def plans_of(self) -> Mapping[str, tuple[Row, ...]]:
        """The plans that a piece, kernels or a library are part of, by the key of that part."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            for key in self._parts(row):
                found.setdefault(key, []).append(row)
        return {key: tuple(rows) for key, rows in found.items()}

    @cached_property
    def _kept_for(self) -> Mapping[str, tuple[str, ...]]:
        """The keys of a plan's kernels, by the plan's key.

        A plan has one entry of kernels, unless another version kept others.
        """
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.view is not None and row.view.kind in FOR_A_PLAN and row.view.of is not None:
                found.setdefault(row.view.of, []).append(row.key)
        return {key: tuple(keys) for key, keys in found.items()}

    @cached_property
    def _libraries(self) -> Mapping[tuple[tuple[str, str], ...], tuple[str, ...]]:
        """The keys of the libraries for a processor, by its facts."""
        found: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for row in self.rows:
            if row.view is not None and row.view.kind == LIBRARY and row.view.processor:
                found.setdefault(row.view.processor, []).append(row.key)
        return {processor: tuple(keys) for processor, keys in found.items()}

    def _parts(self, row: Row) -> tuple[str, ...]:
        if row.view is None:
            return ()
        libraries = self._libraries.get(row.view.processor, ()) if row.view.kind == PLAN else ()
        return (*row.view.pieces, *self._kept_for.get(row.key, ()), *libraries)

    def with_pieces(self, keys: Iterable[str]) -> list[str]:
        """Return `keys`, each followed by the keys of its existing pieces and kernels; each once."""
        found: dict[str, None] = {}
        for key in keys:
            found[key] = None
            found.update((part, None) for part in self._parts(self.by_key[key]) if part in self.by_key)
        return list(found)

    def with_own_pieces(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of `with_pieces` without the parts that a plan outside `keys` has too."""
        chosen = list(keys)
        others = {
            piece
            for piece, plans in self.plans_of.items()
            if piece not in chosen and any(plan.key not in chosen for plan in plans)
        }
        return [key for key in self.with_pieces(chosen) if key not in others]

    def models(self, row: Row) -> tuple[str, ...]:
        """Return the titles of the entry's models; a part has those of the plans it is part of."""
        rows = (row, *self.plans_of.get(row.key, ()))
        titles = (each.view.title for each in rows if each.view is not None)
        return tuple(dict.fromkeys(title for title in titles if title is not None))

    def size_with_pieces(self, row: Row) -> int:
        """Return the bytes of the entry, its parts and their blobs, each content once."""
        if not self._parts(row):
            return row.listed.size
        rows = [self.by_key[key] for key in self.with_pieces([row.key])]
        return sum(each.listed.file.size for each in rows) + sum(blob_sizes(rows).values())


def read_listing(store: Store) -> Listing:
    """Read each entry once, and the record of events once. Raises PermissionError."""
    with _no_garbage_collection():
        totals = store.counters.read()
        listed = store.list()
        good = {each.key for each in listed if each.file.problem is None}
        return Listing(tuple(_row(each, totals, good) for each in listed))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off inside the block.

    All objects made there are kept, and scanning them again and again takes a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def blob_sizes(rows: Iterable[Row]) -> dict[str, int]:
    """Return the bytes of the blobs that `rows` name, by digest."""
    entries = [row.listed.file.entry for row in rows if row.listed.file.entry is not None]
    return {ref.digest: ref.size for entry in entries for ref in entry.blobs.values()}


def _row(listed: Listed, totals: Totals, good: set[str]) -> Row:
    entry = listed.file.entry
    shown = view(entry) if entry is not None else None
    state, detail = listed.state, listed.file.detail
    if shown is not None and listed.file.problem is None:
        missing = sum(key not in good for key in shown.pieces)
        if missing:
            state, detail = MISSING_PIECES, f"{missing} of {len(shown.pieces)} cannot be loaded"
    hits = totals.hits_by_key.get(listed.key, 0)
    return Row(listed=listed, view=shown, hits=hits, state=state, detail=detail)
