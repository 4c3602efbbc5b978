from __future__ import annotations

import io
from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import CacheCommand, save_model, save_piece


def test_everything_goes_at_once(store: Store, cache: CacheCommand) -> None:
    """This includes blobs that were just written, unreadable entries, and the statistics."""
    model = save_model(store)
    empty = save_piece(store, "one").key
    store.layout.entry(empty).write_bytes(b"")
    record = cache.json("clear", "-y")
    assert set(record["removed"]) == {model.plan.key, empty, *(piece.key for piece in model.pieces)}
    left = cache.json("du")
    assert (left["entries"]["files"], left["blobs"]["files"], left["total_bytes"]) == (0, 0, 0)
    assert cache.json("stats")["saves"] == 0


def test_quarantine_stays(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    store.layout.entry(key).write_bytes(b"{")
    store.load(key)
    cache("clear", "-y")
    assert len(cache.json("quarantine", "ls")) == 1


def test_clearing_asks_first(
    store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    save_model(store)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    cache("clear", code=1)
    assert f"Remove all 3 entries of {cache_dir}? [y/N]" in cache.err
    assert len(cache.json("ls")) == 1


def test_nothing_to_clear(cache: CacheCommand) -> None:
    assert cache.json("clear") == {"removed": [], "freed_bytes": 0}
    assert "there is no cache" in cache.err
