"""Damage to every kind of file that `cache/` writes: found before use, never an exception, mended by the next save."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from piecegraph.cache.disk.counters import Counters
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.single_flight import Patience, single_flight
from piecegraph.cache.store.store import Loaded, NotSaved, Saved, Store
from piecegraph.cache.trust.key_files import read_own_key
from piecegraph.cache.trust.quarantine import clear_quarantine, quarantined
from piecegraph.cache.upkeep.archive import export_archive, import_archive
from piecegraph.cache.upkeep.collect import collect
from piecegraph.errors import ArchiveRefused, UntrustedCache
from tests.cache.cache_roots import BLOBS, NOW, a_store, an_entry, loads, saved


def damaged(good: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`good` with a bit flipped or its end cut off, two to one."""
    chance = random.Random(seed)
    for _ in range(count):
        if chance.random() < 1 / 3:
            yield good[: chance.randrange(len(good))]
        else:
            at, bit = chance.randrange(len(good)), chance.randrange(8)
            yield good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :]


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Saved, loaded and locked once, so that every kind of file is there; nothing is synced, which is slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    store = a_store(tmp_path)
    entry = saved(store)
    with single_flight(store.layout, entry.key):
        assert loads(store, entry)
    return entry


def refused(folder: Path) -> str | None:
    """Return the reason why the store in `folder` cannot be opened."""
    try:
        a_store(folder)
    except UntrustedCache as error:
        return str(error)
    return None


def file_of(kind: str, store: Store, entry: Entry) -> Path:
    layout = store.layout
    return {
        "entry": layout.entry(entry.key),
        "blob": layout.blob(entry.blobs["piece/0"].digest),
        "small blob": layout.blob(entry.blobs["plan"].digest),
        "stamp": layout.stamp(entry.key),
        "counters": layout.counters,
        "lock": layout.lock(entry.key),
        "key": layout.root.parent / "user" / "cache.key",
    }[kind]


@pytest.mark.parametrize(("kind", "count"), [("entry", 1500), ("blob", 1200), ("small blob", 40)])
def test_damage_to_what_is_loaded_is_a_miss_and_compiled_again(
    tmp_path: Path, entry: Entry, kind: str, count: int
) -> None:
    store = a_store(tmp_path)
    path = file_of(kind, store, entry)
    good = path.read_bytes()
    for number, data in enumerate(damaged(good, count, seed=1)):
        path.write_bytes(data)
        assert not isinstance(store.load(entry.key), Loaded), data
        assert isinstance(store.save(entry, BLOBS), Saved)
        assert path.read_bytes() == good
        if number % 100 == 0:
            assert loads(store, entry)
            clear_quarantine(store.layout)
            store.counters.clear()
    assert loads(store, entry)


def test_damage_to_an_archive_is_refused_before_a_byte_is_written(tmp_path: Path, entry: Entry) -> None:
    store = a_store(tmp_path)
    path = tmp_path / "archive"
    export_archive(store, path, [entry.key])
    target = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "user" / "cache.key")
    good = path.read_bytes()
    for data in damaged(good, 1500, seed=2):
        path.write_bytes(data)
        with pytest.raises(ArchiveRefused):
            import_archive(target, path)
        assert not target.layout.root.exists()
    path.write_bytes(good)
    import_archive(target, path)
    assert isinstance(target.load(entry.key), Loaded)


def test_damage_to_the_key_is_another_key_or_none(tmp_path: Path, entry: Entry) -> None:
    """What is signed by another key is not ours, and without a key nothing is; a digit written as a capital is the
    same key."""
    path = file_of("key", a_store(tmp_path), entry)
    good, key = path.read_bytes(), read_own_key(path)
    same = 0
    for data in damaged(good, 500, seed=3):
        path.write_bytes(data)
        if (refusal := refused(tmp_path)) is not None:
            assert f"Run: mv {path} {path}.old" in refusal
            continue
        store = a_store(tmp_path)
        is_same = read_own_key(path) == key
        assert isinstance(store.verify(entry.key), Loaded) == is_same
        same += is_same
    assert same < 80
    path.write_bytes(good)
    assert loads(a_store(tmp_path), entry)


def test_damage_to_counters_invents_no_event(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "log")
    for number in range(5):
        counters.hit("a" * 64, 1.5 + number)
        counters.miss("b" * 64, "absent")
    good, whole = counters.path.read_bytes(), counters.read()
    for data in damaged(good, 500, seed=4):
        counters.path.write_bytes(data)
        totals = counters.read()
        assert totals.unreadable or good.startswith(data)
        assert totals.hits <= whole.hits
        assert totals.seconds_saved < whole.seconds_saved or totals.hits == whole.hits
        assert set(totals.misses) <= {"absent"}
        assert set(totals.hits_by_key) <= {"a" * 64}
        counters.hit("a" * 64, 1.0)
        assert counters.read().hits >= totals.hits


@pytest.mark.parametrize("kind", ["stamp", "lock"])
def test_what_files_without_content_hold_changes_nothing(tmp_path: Path, entry: Entry, kind: str) -> None:
    store = a_store(tmp_path)
    for data in damaged(b"never read" * 3, 30, seed=5):
        file_of(kind, store, entry).write_bytes(data)
        with single_flight(store.layout, entry.key, Patience(timeout_s=0)) as flight:
            assert flight.held
            assert loads(store, entry)
        assert [row.state for row in store.list()] == ["complete"]


def a_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_bytes(b"x")


def a_huge_hole(path: Path) -> None:
    path.write_bytes(b"x")
    os.truncate(path, 1 << 40)


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "an empty file": lambda path: path.write_bytes(b""),
    "a full folder": a_full_folder,
    "a pipe": os.mkfifo,
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a huge hole": a_huge_hole,
}


@pytest.mark.parametrize("kind", ["entry", "blob", "stamp", "counters", "lock", "key"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_whatever_lies_in_place_of_a_file_nothing_is_raised(
    tmp_path: Path, entry: Entry, kind: str, replacement: str
) -> None:
    """A key that is no key is refused with the command to remove it; all else is a miss, saved anew, and swept."""
    other = saved(a_store(tmp_path), eps=3.0)
    path = file_of(kind, a_store(tmp_path), entry)
    path.unlink(missing_ok=kind == "lock")
    REPLACEMENTS[replacement](path)
    if (refusal := refused(tmp_path)) is not None:
        assert kind == "key"
        assert refusal.endswith((f"Run: mv {path} {path}.old", f"Run: chmod 600 {path}"))
        return
    store = a_store(tmp_path)
    is_loaded = isinstance(store.load(entry.key), Loaded)
    assert is_loaded == (kind in ("stamp", "counters", "lock"))
    assert not (kind == "entry" and store.exists(entry.key))
    assert {row.key for row in store.list()} >= {other.key}
    store.counters.read()
    with single_flight(store.layout, entry.key, Patience(timeout_s=0)) as flight:
        assert flight.held or kind == "lock"
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)
    collect(store.layout, now=NOW * 2, max_bytes=0, fresh_s=0)
    assert [row.key for row in store.list()] == []
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)


@pytest.mark.parametrize("kind", ["entry", "blob", "small blob", "stamp"])
def test_folders_in_place_of_files_are_in_nobodys_way(tmp_path: Path, entry: Entry, kind: str) -> None:
    """Without a load before that would have moved them."""
    store = a_store(tmp_path)
    for use in (
        lambda: store.save(entry, BLOBS),
        lambda: store.delete(entry.key),
        lambda: collect(store.layout, now=NOW * 2, max_bytes=0),
    ):
        path = file_of(kind, store, entry)
        if not path.is_dir():  # a stamp may as well be one: only its time counts
            path.unlink()
            a_full_folder(path)
        use()
        assert isinstance(store.save(entry, BLOBS), Saved)
        assert loads(store, entry)


@pytest.mark.parametrize("folder", ["entries", "blobs", "quarantine", "locks", "temp", "used"])
@pytest.mark.parametrize("replacement", ["nothing", "a file"])
def test_a_folder_that_is_gone_is_made_and_one_that_is_a_file_is_refused(
    tmp_path: Path, entry: Entry, folder: str, replacement: str
) -> None:
    early = a_store(tmp_path)
    path = tmp_path / "cache" / "v1" / folder
    shutil.rmtree(path)
    if replacement == "a file":
        path.write_bytes(b"")
        with pytest.raises(UntrustedCache, match=f"mv {path} {path}.old"):
            a_store(tmp_path)
    assert isinstance(early.load(entry.key), Loaded) == (folder not in ("entries", "blobs"))
    assert isinstance(early.save(an_entry(eps=5.0), BLOBS), Saved if replacement == "nothing" else NotSaved)
    assert early.list() or folder == "entries"
    early.counters.read()
    assert not quarantined(early.layout)
