"""Stores for tests, with a key of their own and a clock that stands still, and processes that use them."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Loaded, Saved, Store

FULL = os.environ.get("CACHE_TESTS") == "full"
"""Take the time the longest tests are meant to take."""

NOW = 1_800_000_000.0
BLOBS = {"plan": b"steps", "piece/0": b"machine code" * 100}


ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 1e308, -1.0, "../../x", "/etc/passwd", "\ud800", "\0", "a" * 64])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""The contents that an attacker may write in place of any file."""


@st.composite
def tampered(draw: st.DrawFn, document: Any) -> Any:
    """`document` with one to three places replaced, removed or added to."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while True:
            if not isinstance(at, dict | list) or not at:
                break
            place = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if isinstance(at[place], dict | list) and at[place] and draw(st.integers(0, 3)):
                at = at[place]
                continue
            how = draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
            if how == "replace":
                at[place] = draw(ANY_JSON)
            elif how == "remove":
                del at[place]
            elif isinstance(at, dict):
                at[draw(st.text(max_size=5))] = draw(ANY_JSON)
            else:
                at.append(draw(ANY_JSON) if how == "add" else copy.deepcopy(at[place]))
            break
    return document


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
