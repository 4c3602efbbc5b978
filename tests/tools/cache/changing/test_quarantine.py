from __future__ import annotations

import io

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_piece


@pytest.fixture
def bad(store: Store) -> str:
    """The key of an entry that was found corrupt."""
    key = save_piece(store, "one").key
    store.layout.entry(key).write_bytes(b"{")
    store.load(key)
    return key


def test_quarantined_files_are_listed(bad: str, cache: CacheCommand) -> None:
    (row,) = cache.json("quarantine", "ls")
    assert (row["kind"], row["of"], row["size"]) == ("entry", bad, 1)
    header, line = cache("quarantine", "ls").splitlines()
    assert header.split() == ["WHAT", "OF", "SIZE", "CHANGED", "FILE"]
    assert line.startswith(f"entry  {bad[:12]}   1 B  ")
    assert line.endswith(row["name"])


def test_it_is_cleared_when_asked(bad: str, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    cache("quarantine", "clear", code=1)
    assert "Remove 1 files in quarantine at " in cache.err
    assert cache.json("quarantine", "clear", "-y") == {"removed": 1}
    assert cache.json("quarantine", "ls") == []
    assert "nothing is in quarantine at" in cache.err


def test_nothing_to_clear(cache: CacheCommand) -> None:
    assert cache("quarantine", "clear") == "removed 0 files\n"
