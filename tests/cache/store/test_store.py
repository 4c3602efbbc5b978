"""The store: what is saved comes back bit for bit, and what was tampered with never does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.store.entry_file import MissReason
from piecegraph.cache.store.store import Loaded, Miss, NotSaved, Saved, Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.cache.trust.quarantine import quarantined
from piecegraph.errors import CacheError, UntrustedCache
from tests.cache.cache_roots import BLOBS, NOW, a_store, an_entry, loads, saved


def missed(store: Store, key: str) -> MissReason:
    found = store.load(key)
    assert isinstance(found, Miss), "loaded"
    return found.reason


def test_what_was_saved_comes_back_in_another_process(tmp_path: Path) -> None:
    entry = saved(a_store(tmp_path))
    assert loads(a_store(tmp_path), entry)


def test_a_missing_cache_is_a_miss_and_nothing_is_made(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert missed(store, an_entry().key) is MissReason.ABSENT
    assert store.list() == ()
    assert not store.exists(an_entry().key)
    assert not list(tmp_path.iterdir())


def test_files_are_for_the_user_alone(tmp_path: Path) -> None:
    saved(a_store(tmp_path))
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_copied_cache_works(tmp_path: Path) -> None:
    """Nothing in a cache depends on its location."""
    entry = saved(a_store(tmp_path))
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    assert loads(Store.open(tmp_path / "moved", key_file=tmp_path / "user" / "cache.key"), entry)


def test_folders_are_made_before_a_first_save_where_they_can_be(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert store.prepare()
    assert all(folder.is_dir() for folder in store.layout.folders)
    assert missed(store, an_entry().key) is MissReason.ABSENT
    store = Store.open(tmp_path / "other", key_file=tmp_path / "key")
    (tmp_path / "other").write_text("a file")
    assert not store.prepare()


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert store.save(an_entry(), BLOBS) == Saved(an_entry().key, 2)
    other = an_entry(eps=1e-5)
    assert store.save(other, BLOBS) == Saved(other.key, 0)
    assert len(list(store.layout.blobs.iterdir())) == 2


def every_file(root: Path) -> list[Path]:
    return sorted([*(root / "v1" / "entries").iterdir(), *(root / "v1" / "blobs").iterdir()])


def test_every_flipped_bit_and_every_truncation_is_a_miss(tmp_path: Path) -> None:
    """No exception, no wrong byte handed out; after the next save all is well again."""
    store = a_store(tmp_path)
    entry = saved(store)
    tried = 0
    for path in every_file(store.layout.root):
        good = path.read_bytes()
        damaged = [good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :] for at in range(0, len(good), 5)]
        damaged += [good[:at] for at in range(0, len(good), 41)] + [good + b"\n", good * 2]
        for data in damaged:
            path.write_bytes(data)
            assert isinstance(store.verify(entry.key), Miss), data
            tried += 1
        path.write_bytes(good)
        assert isinstance(store.verify(entry.key), Loaded)
    assert tried > 300


@pytest.mark.parametrize(("index", "reason"), [(0, MissReason.CORRUPT), (-1, MissReason.BLOB_CORRUPT)])
def test_bad_bytes_go_to_quarantine_and_are_counted_and_saved_anew(
    tmp_path: Path, index: int, reason: MissReason
) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    path = [store.layout.entry(entry.key), *store.layout.blobs.iterdir()][index]
    path.write_bytes(b"?")
    assert missed(store, entry.key) is reason
    assert not path.exists()
    (bad,) = quarantined(store.layout)
    assert bad.size == 1
    assert path.name.startswith(bad.of)
    totals = store.counters.read()
    assert (totals.quarantined, totals.misses) == (1, {reason.value: 1})
    assert isinstance(store.save(entry, BLOBS), Saved)
    assert loads(store, entry)


def test_two_blobs_that_changed_places_are_no_hit(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    one, two = store.layout.blobs.iterdir()
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    assert missed(store, entry.key) is MissReason.BLOB_CORRUPT


def test_an_entry_under_another_key_is_no_hit(tmp_path: Path) -> None:
    """Its signature is good; it is just not what was asked for."""
    store = a_store(tmp_path)
    mine, other = saved(store), saved(store, eps=1e-5)
    shutil.copy(store.layout.entry(mine.key), store.layout.entry(other.key))
    assert missed(store, other.key) is MissReason.CORRUPT


def test_an_entry_whose_factors_do_not_make_its_key_is_no_hit(tmp_path: Path) -> None:
    """Even one that we signed: a bug of ours would be a wrong artifact otherwise."""
    store = a_store(tmp_path)
    entry = saved(store)
    document = parse_canonical(store.layout.entry(entry.key).read_bytes())["entry"] | {"factors": {"eps": 1.0}}
    data = canonical_json({"entry": document, "signature": store.signer.sign("entry", canonical_json(document))})
    store.layout.entry(entry.key).write_bytes(data)
    assert missed(store, entry.key) is MissReason.CORRUPT


def test_signed_nonsense_and_deep_nests_are_no_hits(tmp_path: Path) -> None:
    """Whatever is under the name of an entry: a listing and a load go on."""
    store = a_store(tmp_path)
    entry = saved(store)
    for document in (b"[]", b"1", b'{"format":1}', b"{", b"[" * 100_000 + b"]" * 100_000, b"\xff", b"NaN"):
        signature = canonical_json(store.signer.sign("entry", document))
        for data in (b'{"entry":' + document + b',"signature":' + signature + b"}", document):
            store.layout.entry(entry.key).write_bytes(data)
            assert store.list()[0].state == "corrupt"
            assert missed(store, entry.key) is MissReason.CORRUPT


@pytest.mark.parametrize("which", ["entry", "blob"])
def test_a_link_is_not_followed(tmp_path: Path, which: str) -> None:
    """Even to the right bytes: who owns them may change them between check and use."""
    store = a_store(tmp_path)
    entry = saved(store)
    path = store.layout.entry(entry.key) if which == "entry" else store.layout.blob(entry.blobs["plan"].digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert isinstance(store.load(entry.key), Miss)
    assert (tmp_path / "elsewhere").is_file()
    assert len(quarantined(store.layout)) == 1
    saved(store)
    assert loads(store, entry)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_folder_in_place_of_a_file_is_quarantined(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe is not waited for either."""
    store = a_store(tmp_path)
    entry = saved(store)
    store.layout.entry(entry.key).unlink()
    make(store.layout.entry(entry.key))
    assert missed(store, entry.key) is MissReason.CORRUPT
    saved(store)
    assert loads(store, entry)


def test_an_entry_of_a_newer_version_is_listed_and_not_loaded(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    path = store.layout.entry(entry.key)
    document = parse_canonical(path.read_bytes())["entry"] | {"format": 2, "colour": "blue"}
    path.write_bytes(
        canonical_json({"entry": document, "signature": store.signer.sign("entry", canonical_json(document))})
    )
    assert missed(store, entry.key) is MissReason.OTHER_VERSION
    assert path.exists(), "it is no damage"
    (row,) = store.list()
    assert row.state == "other version"
    assert row.file.entry is not None
    assert row.file.entry.unknown == {"colour": "blue"}


def test_a_world_writable_root_is_refused_with_the_command(tmp_path: Path) -> None:
    saved(a_store(tmp_path))
    for folder in (tmp_path / "cache", tmp_path / "cache" / "v1" / "blobs"):
        folder.chmod(0o777)
        with pytest.raises(UntrustedCache, match=f"chmod go-w {folder}"):
            a_store(tmp_path)
        folder.chmod(0o700)
    a_store(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="a key of a third user is refused, so the builder has to be root")
def test_another_users_root_is_refused_and_with_its_key_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image: filled by root with a signing key, read by somebody else."""
    signing = tmp_path / "signing.key"
    signing.write_text("ab" * 32)
    signing.chmod(0o640)
    before = os.umask(0o077)  # a careful image build
    try:
        entry = saved(a_store(tmp_path, signing_key_file=signing, publish=True))
    finally:
        os.umask(before)
    someone = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: someone)
    mine = tmp_path / "mine.key"
    with pytest.raises(UntrustedCache, match="belongs to user"):
        Store.open(tmp_path / "cache", key_file=mine)
    files = sorted(tmp_path.rglob("*"))
    reader = Store.open(tmp_path / "cache", key_file=mine, signing_key_file=signing)
    assert reader.access is Access.READ_ONLY
    assert loads(reader, entry)
    assert isinstance(reader.save(entry, BLOBS), NotSaved)
    assert sorted(tmp_path.rglob("*")) == files
    for path in every_file(tmp_path / "cache"):
        assert path.stat().st_mode & 0o777 == 0o644, path
    assert (tmp_path / "cache" / "v1" / "blobs").stat().st_mode & 0o777 == 0o755


def test_an_entry_of_the_own_key_is_not_published(tmp_path: Path) -> None:
    """It is saved anew for others, who can read all of it."""
    create_key_pair(tmp_path / "image.key")
    own = saved(a_store(tmp_path))
    publisher = a_store(tmp_path, signing_key_file=tmp_path / "image.key", publish=True)
    assert missed(publisher, own.key) is MissReason.UNTRUSTED
    assert saved(publisher).key == own.key
    assert loads(publisher, own)
    for ref in own.blobs.values():
        assert publisher.layout.blob(ref.digest).stat().st_mode & 0o777 == 0o644
    assert publisher.layout.entry(own.key).stat().st_mode & 0o777 == 0o644
    assert publisher.layout.entries.stat().st_mode & 0o777 == 0o755


def test_nothing_is_published_with_a_public_key(tmp_path: Path) -> None:
    public = create_key_pair(tmp_path / "image.key")
    with pytest.raises(CacheError, match=f"{public} is a public key.*Name the private key"):
        a_store(tmp_path, signing_key_file=public, publish=True)


def test_in_ones_own_root_a_public_key_only_verifies(tmp_path: Path) -> None:
    """The entries that its holder saves are signed with the holder's own key."""
    public = create_key_pair(tmp_path / "image.key")
    published = saved(a_store(tmp_path, signing_key_file=tmp_path / "image.key", publish=True))
    reader = a_store(tmp_path, signing_key_file=public)
    mine = saved(reader, eps=1e-5)
    assert loads(reader, published)
    assert loads(reader, mine)
    assert [row.state for row in reader.list()] == ["complete", "complete"]
    assert {row.key: row.state for row in a_store(tmp_path).list()} == {
        published.key: "untrusted",
        mine.key: "complete",
    }


@pytest.mark.parametrize("how", ["by another pair", "flipped", "changed", "of another scheme"])
def test_what_a_private_key_has_not_signed_is_no_hit(tmp_path: Path, how: str) -> None:
    public = create_key_pair(tmp_path / "image.key")
    entry = saved(a_store(tmp_path, signing_key_file=tmp_path / "image.key", publish=True))
    store = a_store(tmp_path, signing_key_file=public)
    file = parse_canonical(store.layout.entry(entry.key).read_bytes())
    if how == "by another pair":
        create_key_pair(tmp_path / "other.key")
        saved(a_store(tmp_path, signing_key_file=tmp_path / "other.key", publish=True))
        file = parse_canonical(store.layout.entry(entry.key).read_bytes())
    elif how == "flipped":
        file["signature"]["value"] = file["signature"]["value"][::-1]
    elif how == "changed":
        file["entry"]["notes"] = {"better": True}
    else:
        file["signature"]["scheme"] = "ed448"
    store.layout.entry(entry.key).write_bytes(canonical_json(file))
    expected = MissReason.FORGED if how in ("flipped", "changed") else MissReason.UNTRUSTED
    assert store.list()[0].file.problem is expected
    assert missed(store, entry.key) is expected


def test_a_root_that_others_made_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    """There was none when the store was opened."""
    early = a_store(tmp_path)
    for folder in early.layout.folders:
        folder.mkdir()
        folder.chmod(0o777)
    assert not early.prepare()
    done = early.save(an_entry(), BLOBS)
    assert isinstance(done, NotSaved)
    assert f"chmod go-w {tmp_path / 'cache'}" in done.reason
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def failing(number: int) -> Callable[..., Any]:
    def fail(*_args: Any, **_options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("call", "number"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EROFS)])
def test_a_disk_that_takes_nothing_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    other = an_entry({"plan": b"new"}, eps=2.0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, failing(number))
        for _ in range(3):
            not_saved = store.save(other, {"plan": b"new"})
            assert isinstance(not_saved, NotSaved)
            assert os.strerror(number) in not_saved.reason
    assert len(caplog.records) == 1
    assert not list(store.layout.temp.iterdir())
    assert missed(store, other.key) is MissReason.ABSENT
    assert loads(store, entry)


def test_a_root_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UntrustedCache, match="is not a directory"):
        a_store(tmp_path)
    (tmp_path / "cache").unlink()
    store = a_store(tmp_path)
    (tmp_path / "cache").write_text("a file")
    assert isinstance(store.save(an_entry(), BLOBS), NotSaved)


def test_a_read_only_root_still_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted image of ours: no stamp, no count, and no complaint."""
    store = a_store(tmp_path)
    entry = saved(store)
    really_open = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    monkeypatch.setattr(os, "rename", failing(errno.EROFS))
    assert loads(store, entry)
    store.layout.blob(entry.blobs["plan"].digest).write_bytes(b"?")
    assert missed(store, entry.key) is MissReason.BLOB_CORRUPT


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    monkeypatch.setattr(os, "read", failing(errno.EIO))
    assert missed(store, entry.key) is MissReason.UNREADABLE


def test_an_entry_used_in_the_future_counts_as_used_now(tmp_path: Path) -> None:
    """A stamp in the future counts as used now, neither as oldest nor as newest for ever."""
    store = a_store(tmp_path)
    entry = saved(store)
    store.clock = lambda: NOW - 86400
    assert store.list()[0].last_used == NOW - 86400
    assert loads(store, entry)
    store.clock = lambda: NOW
    assert store.list()[0].last_used == NOW - 86400


def test_a_listing_of_a_thousand_reads_each_entry_once_and_no_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for number in range(1000):
        saved(store, {"plan": b"x"}, number=number)
    opened: list[str] = []
    really_open = os.open

    def counting(path: Any, *rest: Any, **options: Any) -> int:
        opened.append(str(path))
        return really_open(path, *rest, **options)

    monkeypatch.setattr(os, "open", counting)
    rows = a_store(tmp_path).list()
    assert len(rows) == 1000
    assert {row.state for row in rows} == {"complete"}
    assert len(opened) <= 1001, "an entry each, and the key"
    assert not [path for path in opened if "blobs" in path]


def test_stray_names_are_no_entries(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    for name in ("README", "..json", f"{entry.key}.bak", f"{entry.key.upper()}.json"):
        (store.layout.entries / name).write_text("{}")
    assert [row.key for row in store.list()] == [entry.key]


def test_delete_says_whether_there_was_one(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    assert store.exists(entry.key)
    assert store.delete(entry.key)
    assert not store.delete(entry.key)
    assert not store.exists(entry.key)


def test_hits_and_misses_are_counted(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    store.load(entry.key)
    store.load(entry.key)
    store.load(an_entry(eps=0.5).key)
    store.verify(entry.key)
    totals = store.counters.read()
    assert (totals.hits, totals.misses, totals.saves) == (2, {"absent": 1}, 1)
    assert totals.seconds_saved == 6.0
    assert totals.hits_by_key == {entry.key: 2}


def test_a_key_that_another_process_made_is_found(tmp_path: Path) -> None:
    """This one was opened when there was none."""
    early = a_store(tmp_path)
    entry = saved(a_store(tmp_path))
    assert loads(early, entry)


def test_another_users_key_does_not_open_a_copied_cache(tmp_path: Path) -> None:
    entry = saved(a_store(tmp_path))
    other = Store.open(tmp_path / "cache", key_file=tmp_path / "other.key")
    assert missed(other, entry.key) is MissReason.UNTRUSTED
    assert not quarantined(other.layout), "it may be right for its owner"
    assert isinstance(other.save(entry, BLOBS), Saved)
    assert loads(other, entry)
