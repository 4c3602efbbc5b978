from __future__ import annotations

import os

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import NOW, CacheCommand, save_piece


@pytest.fixture
def old_and_new(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two entries, one 40 days and one 10 days old, whose blobs are as old."""
    keys = []
    for name, days in (("old", 40), ("new", 10)):
        store.clock = lambda days=days: NOW - days * 86400  # type: ignore[misc]
        entry = save_piece(store, name)
        for ref in entry.blobs.values():
            os.utime(store.layout.blob(ref.digest), (NOW - 86400, NOW - 86400))
        keys.append(entry.key)
    monkeypatch.setattr("time.time", lambda: NOW)
    return keys[0], keys[1]


def test_old_entries_are_removed(old_and_new: tuple[str, str], cache: CacheCommand, store: Store) -> None:
    before = cache.json("du")["total_bytes"]
    record = cache.json("gc", "--older-than", "30d")
    assert (record["entries"], record["dry_run"]) == ([old_and_new[0]], False)
    assert len(record["blobs"]) == 4  # both have the same `piece`
    assert cache.json("du")["total_bytes"] == before - record["freed_bytes"]
    assert [row["key"] for row in cache.json("ls")] == [old_and_new[1]]


def test_a_dry_run_says_what_would_go(old_and_new: tuple[str, str], cache: CacheCommand) -> None:
    record = cache.json("gc", "--older-than", "30d", "--dry-run")
    assert (record["entries"], record["dry_run"]) == ([old_and_new[0]], True)
    assert len(cache.json("ls")) == 2
    assert cache("gc", "--max-size", "0", "--dry-run").startswith("would remove 2 entries, 9 blobs, 0 files of killed")


def test_the_longest_unused_goes_first(old_and_new: tuple[str, str], cache: CacheCommand) -> None:
    room = cache.json("du")
    used = room["entries"]["bytes"] + room["blobs"]["bytes"]
    assert cache("gc", "--max-size", str(used)).startswith("removed 0 entries")
    assert cache("gc", "--max-size", str(used - 1)).startswith("removed 1 entries, 4 blobs")
    assert [row["key"] for row in cache.json("ls")] == [old_and_new[1]]


def test_the_environment_says_how_much_may_stay(
    old_and_new: tuple[str, str], cache: CacheCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.json("gc")["entries"] == []
    monkeypatch.setenv("PIECEGRAPH_CACHE_MAX_SIZE", "0")
    assert cache.json("du")["max_bytes"] == 0
    assert cache("gc", "--max-size", "1G").startswith("removed 0 entries")
    assert sorted(cache.json("gc")["entries"]) == sorted(old_and_new)


def test_no_cache(cache: CacheCommand) -> None:
    assert cache.json("gc")["entries"] == []


def test_a_size_that_is_none(cache: CacheCommand) -> None:
    cache("gc", "--max-size", "lots", code=2)
    assert "'lots' is not a size like 500M or 10GiB." in cache.err
