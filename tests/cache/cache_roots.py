"""Stores for tests, with a key of their own and a clock that stands still, and processes that use them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piecegraph.cache.entry import Entry
from piecegraph.cache.store import Loaded, Saved, Store

FULL = os.environ.get("CACHE_TESTS") == "full"
"""Take the time the longest tests are meant to take."""

NOW = 1_800_000_000.0
BLOBS = {"plan": b"steps", "piece/0": b"machine code" * 100}


def a_store(tmp_path: Path, **options: Any) -> Store:
    """The store of this test; opened again, it is another process's view of the same."""
    store = Store.open(tmp_path / "cache", key_file=tmp_path / "user" / "cache.key", **options)
    store.clock = lambda: NOW
    return store


def an_entry(blobs: dict[str, bytes] | None = None, **factors: Any) -> Entry:
    return Entry.of(
        {"model": "tiny", "eps": 1e-6, **factors},
        BLOBS if blobs is None else blobs,
        created=NOW,
        seconds={"compile": 2.5, "trace": 0.5},
        versions={"torch": "2.13.0"},
    )


def saved(store: Store, blobs: dict[str, bytes] | None = None, **factors: Any) -> Entry:
    """An entry that is in the store."""
    entry = an_entry(blobs, **factors)
    assert isinstance(store.save(entry, BLOBS if blobs is None else blobs), Saved)
    return entry


def loads(store: Store, entry: Entry, blobs: dict[str, bytes] | None = None) -> bool:
    """The very same comes back."""
    found = store.load(entry.key)
    return isinstance(found, Loaded) and found.entry == entry and found.blobs == (BLOBS if blobs is None else blobs)


def start(body: Callable[[], None]) -> int:
    """The id of a forked process that runs `body`, and ends with status 0 unless that raises."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return pid
