"""Collection: what is longest unused goes first, and nothing that somebody needs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from piecegraph.cache.disk.canonical import canonical_json
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Loaded, Saved, Store
from piecegraph.cache.upkeep.collect import FRESH_S, Collected, collect, collect_if_over
from tests.cache.cache_roots import NOW, a_store, an_entry, loads, saved


def used(store: Store, at: float, name: str, size: int = 1000) -> Entry:
    """An entry that was saved and last used at `at`, with a blob of its own."""
    blobs = {"plan": name.encode().ljust(size, b".")}
    store.clock = lambda: at
    entry = saved(store, blobs, name=name)
    os.utime(store.layout.blob(entry.blobs["plan"].digest), (at, at))
    store.clock = lambda: NOW
    return entry


def keys(store: Store) -> set[str]:
    return {row.key for row in store.list()}


def test_the_longest_unused_goes_first_until_it_fits(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    old, middle, new = (used(store, NOW - age, name) for age, name in ((9e4, "a"), (8e4, "b"), (7e4, "c")))
    total = sum(row.size for row in store.list())
    done = collect(store.layout, now=NOW, max_bytes=total - 1)
    assert done.entries == (old.key,)
    assert keys(store) == {middle.key, new.key}
    assert done.kept_bytes == sum(row.size for row in store.list()) == total - done.freed_bytes
    assert {path.name for path in store.layout.blobs.iterdir()} == {
        entry.blobs["plan"].digest for entry in (middle, new)
    }


def test_a_hit_makes_an_entry_the_newest(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    old, new = used(store, NOW - 9e4, "a"), used(store, NOW - 8e4, "b")
    assert isinstance(store.load(old.key), Loaded)
    assert collect(store.layout, now=NOW, max_bytes=2000).entries == (new.key,)
    assert keys(store) == {old.key}


def test_older_than_takes_those_and_no_others(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    old, new = used(store, NOW - 9e4, "a"), used(store, NOW - 1e4, "b")
    assert collect(store.layout, now=NOW, older_than_s=5e4).entries == (old.key,)
    assert keys(store) == {new.key}


def test_a_dry_run_reports_the_same_and_removes_nothing(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    used(store, NOW - 9e4, "a")
    (store.layout.temp / "left.tmp").write_text("x")
    os.utime(store.layout.temp / "left.tmp", (0, 0))
    before = sorted(tmp_path.rglob("*"))
    said = collect(store.layout, now=NOW, max_bytes=0, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert collect(store.layout, now=NOW, max_bytes=0) == said
    assert (len(said.entries), len(said.blobs), said.temp_files, said.kept_bytes) == (1, 1, 1, 0)
    assert not list(store.layout.blobs.iterdir())


def test_a_blob_that_another_entry_names_stays(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    blobs = {"plan": b"shared"}
    store.clock = lambda: NOW - 9e4
    saved(store, blobs, number=1)
    store.clock = lambda: NOW
    kept = saved(store, blobs, number=2)
    os.utime(store.layout.blob(kept.blobs["plan"].digest), (0, 0))
    done = collect(store.layout, now=NOW, older_than_s=1e4)
    assert (len(done.entries), done.blobs) == (1, ())
    assert loads(store, kept, blobs)


def test_a_blob_that_no_entry_names_stays_while_it_is_fresh(tmp_path: Path) -> None:
    """Somebody is between his blobs and his entry."""
    store = a_store(tmp_path)
    entry = used(store, NOW, "a")
    store.delete(entry.key)
    path = store.layout.blob(entry.blobs["plan"].digest)
    for age, stays in ((FRESH_S - 1, True), (1 - FRESH_S, True), (FRESH_S, False)):
        os.utime(path, (NOW - age, NOW - age))
        assert bool(collect(store.layout, now=NOW).blobs) != stays
        assert path.exists() == stays


def test_saving_makes_a_blob_that_was_there_fresh_again(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = used(store, 0.0, "a")
    path = store.layout.blob(entry.blobs["plan"].digest)
    assert isinstance(store.save(entry, {"plan": b"a".ljust(1000, b".")}), Saved)
    store.delete(entry.key)
    assert collect(store.layout, now=path.stat().st_mtime).blobs == ()


def test_a_reader_keeps_what_it_has_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is collected between the opening of a blob and the reading of it: still a hit."""
    store = a_store(tmp_path)
    entry = used(store, 0.0, "a")
    really_open = os.open

    def then_collect(path: Path, *rest: int) -> int:
        fd = really_open(path, *rest)
        if Path(path).parent == store.layout.blobs:
            monkeypatch.setattr(os, "open", really_open)
            assert collect(store.layout, now=NOW, max_bytes=0).entries == (entry.key,)
        return fd

    monkeypatch.setattr(os, "open", then_collect)
    assert isinstance(store.verify(entry.key), Loaded)
    assert keys(store) == set()


def test_temp_files_of_the_living_and_fresh_ones_stay(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    saved(store)
    fresh, living, dead = (store.layout.temp / f"{name}.tmp" for name in ("fresh", "living", "dead"))
    for path, when in ((fresh, NOW), (living, 0), (dead, 0)):
        path.write_text("x")
        os.utime(path, (when, when))
    with living.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert collect(store.layout, now=NOW, fresh_s=0).temp_files == 1
        assert {path.name for path in store.layout.temp.iterdir()} == {"fresh.tmp", "living.tmp"}
    assert collect(store.layout, now=NOW).temp_files == 1


def test_a_clock_that_went_back_removes_nothing_as_old(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = used(store, NOW, "a")
    assert collect(store.layout, now=NOW - 1e6, older_than_s=1.0).entries == ()
    assert loads(store, entry, {"plan": b"a".ljust(1000, b".")})


def test_blobs_of_an_entry_that_cannot_be_made_out_stay(tmp_path: Path) -> None:
    """A newer version may name them in a way of its own."""
    store = a_store(tmp_path)
    entry = used(store, 0.0, "a")
    store.delete(entry.key)
    newer = store.layout.entry("0" * 64)
    newer.write_bytes(canonical_json({"entry": {"format": 9}, "signature": None}))
    assert collect(store.layout, now=NOW).blobs == ()
    newer.unlink()
    assert len(collect(store.layout, now=NOW).blobs) == 1


def test_an_empty_or_missing_cache_is_no_error(tmp_path: Path) -> None:
    assert collect(a_store(tmp_path).layout, now=NOW) == Collected((), (), 0, 0, 0)


def test_an_entry_that_went_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collections at once."""
    store = a_store(tmp_path)
    entry = used(store, 0.0, "a")
    really_unlink = os.unlink

    def twice(path: Path) -> None:
        really_unlink(path)
        really_unlink(path)

    monkeypatch.setattr(os, "unlink", twice)
    assert collect(store.layout, now=NOW, max_bytes=0).entries == (entry.key,)
    assert an_entry().key not in keys(store)


def test_fresh_blobs_do_not_make_more_entries_go(tmp_path: Path) -> None:
    """Blobs that were just written stay for a while, whatever their entries."""
    store = a_store(tmp_path)
    old, new = used(store, NOW - 2, "a"), used(store, NOW - 1, "b")
    total = sum(row.size for row in store.list())
    done = collect(store.layout, now=NOW, max_bytes=total - 1)
    assert (done.entries, done.blobs) == ((old.key,), ())
    assert keys(store) == {new.key}
    assert collect(store.layout, now=NOW, max_bytes=total - 1).entries == ()


def test_an_entry_that_cannot_be_made_out_does_not_make_others_go(tmp_path: Path) -> None:
    """Blobs stay for its sake: that is no reason for entries to go, each time something is collected."""
    store = a_store(tmp_path)
    old, new = used(store, NOW - 9e4, "a"), used(store, NOW - 8e4, "b")
    newer = store.layout.entry("0" * 64)
    newer.write_bytes(canonical_json({"entry": {"format": 9}, "signature": None}))
    os.utime(newer, (NOW, NOW))
    store.layout.stamp("0" * 64).touch()
    os.utime(store.layout.stamp("0" * 64), (NOW, NOW))
    limit = sum(row.size for row in store.list()) - 1
    for gone in ((old.key,), ()):
        assert collect(store.layout, now=NOW, max_bytes=limit).entries == gone
    assert keys(store) == {new.key, "0" * 64}


def test_nothing_is_read_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(tmp_path)
    old, new = used(store, NOW - 9e4, "a"), used(store, NOW - 8e4, "b")
    total = sum(row.size for row in store.list())
    with monkeypatch.context() as patch:
        patch.setattr("piecegraph.cache.upkeep.collect.read_entry_file", None)
        assert collect_if_over(store.layout, now=NOW, max_bytes=total) is None
    done = collect_if_over(store.layout, now=NOW, max_bytes=total - 1)
    assert done is not None
    assert done.entries == (old.key,)
    assert keys(store) == {new.key}
