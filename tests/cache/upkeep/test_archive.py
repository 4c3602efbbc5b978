"""Archives: what was exported comes back, and nothing else is ever written."""

from __future__ import annotations

import errno
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.store.entry import to_document
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.cache.trust.key_files import create_key_pair, read_signing_key
from piecegraph.cache.trust.key_pair import PrivateKey
from piecegraph.cache.trust.keyring import Signer, Verdict
from piecegraph.cache.trust.shared_key import SharedKey
from piecegraph.cache.upkeep.archive import MAGIC, Imported, export_archive, import_archive
from piecegraph.errors import ArchiveRefused, CacheError
from tests.cache.cache_roots import BLOBS, a_store, saved, tampered


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two entries that share their blobs."""
    store = a_store(tmp_path)
    entries = [saved(store), saved(store, eps=1e-5)]
    size = export_archive(store, tmp_path / "file", [entry.key for entry in entries])
    assert (tmp_path / "file").stat().st_size == size < 2 * sum(map(len, BLOBS.values())) + 2500
    return tmp_path / "file"


def elsewhere(archive: Path, key_file: str = "user/cache.key") -> Store:
    """An empty store beside it; with the key of who made it, or another."""
    return Store.open(archive.parent / "elsewhere", key_file=archive.parent / key_file)


def taken_apart(archive: Path) -> tuple[Any, bytes]:
    """(header, blobs)"""
    data = archive.read_bytes()[len(MAGIC) :]
    length = int.from_bytes(data[:8], "big")
    return parse_canonical(data[8 : 8 + length]), data[8 + length :]


def put_together(archive: Path, header: Any, blobs: bytes, key: Signer | None) -> None:
    if key is not None:
        header["signature"] = key.sign("archive", canonical_json(header["manifest"]))
    body = canonical_json(header)
    archive.write_bytes(MAGIC + len(body).to_bytes(8, "big") + body + blobs)


def refused(archive: Path, why: str, *, trust: bool = False, key_file: str = "user/cache.key") -> None:
    with pytest.raises(ArchiveRefused, match=why):
        import_archive(elsewhere(archive, key_file), archive, trust=trust)
    assert not (archive.parent / "elsewhere").exists(), "nothing was written"


def test_what_was_exported_loads_elsewhere(archive: Path) -> None:
    mine, other = a_store(archive.parent), elsewhere(archive)
    keys = {row.key for row in mine.list()}
    imported = import_archive(other, archive)
    assert (set(imported.keys), imported.signed) == (keys, True)
    for row in mine.list():
        assert row.file.entry is not None
        found = other.load(row.key)
        assert isinstance(found, Loaded)
        assert replace(found.entry, origin=()) == row.file.entry
        assert [each["key_id"] for each in found.entry.origin] == [mine.signer.key_id]


def test_a_strangers_archive_needs_trust_and_is_ours_then(archive: Path) -> None:
    refused(archive, "--trust", key_file="other.key")
    store = elsewhere(archive, "other.key")
    imported = import_archive(store, archive, trust=True)
    assert imported == Imported(imported.keys, signed=False)
    for key in imported.keys:
        assert store.exists(key)


def test_trust_forgives_no_forged_signature(archive: Path) -> None:
    header, blobs = taken_apart(archive)
    header["manifest"]["entries"][0]["notes"] = {"better": True}
    put_together(archive, header, blobs, None)
    refused(archive, "damaged, or forged", trust=True)


def test_a_signature_of_an_entry_is_none_of_an_archive(archive: Path) -> None:
    header, blobs = taken_apart(archive)
    key = a_store(archive.parent).signer
    header["signature"] = key.sign("entry", canonical_json(header["manifest"]))
    put_together(archive, header, blobs, None)
    refused(archive, "forged")


def test_every_kind_of_damage_is_refused(archive: Path) -> None:
    """A bit anywhere, an end anywhere, a tail; under --trust as well, but for its signature."""
    good = archive.read_bytes()
    step = len(good) // 60
    damaged = [good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :] for at in range(0, len(good), step)]
    damaged += [good[:at] for at in range(0, len(good), step)] + [good + b"\0", good + good]
    for data in damaged:
        archive.write_bytes(data)
        refused(archive, str(archive))


def rename_blob(manifest: Any, name: str) -> None:
    manifest["blobs"][0]["digest"] = name
    manifest["entries"][0]["blobs"]["plan"]["digest"] = name


def set_size(manifest: Any, size: Any) -> None:
    digest = manifest["blobs"][0]["digest"]
    manifest["blobs"][0]["size"] = size
    for entry in manifest["entries"]:
        for ref in entry["blobs"].values():
            if ref["digest"] == digest:
                ref["size"] = size


ATTACKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a path as a blob's name": (lambda m: rename_blob(m, "../../../etc/passwd"), "no sha256"),
    "an absolute path as a key": (lambda m: m["entries"][0].update(key="/etc/passwd"), "not a sha256"),
    "another key than the factors'": (lambda m: m["entries"][0].update(key="0" * 64), "not that of the factors"),
    "an entry twice": (lambda m: m["entries"].append(m["entries"][0]), "twice"),
    "a blob twice": (lambda m: m["blobs"].append(m["blobs"][0]), "twice"),
    "a blob nobody names": (lambda m: m["blobs"].append({"digest": "0" * 64, "size": 0}), "not those of its entries"),
    "a blob that is not there": (lambda m: m["blobs"].pop(), "not those of its entries"),
    "two sizes for a blob": (lambda m: m["blobs"][0].update(size=1), "not those of its entries"),
    "a link": (lambda m: m["blobs"][0].update(link="/etc/passwd"), "not a digest and a size"),
    "more bytes than there are": (lambda m: set_size(m, 1 << 59), "its manifest says"),
    "fewer bytes than there are": (lambda m: set_size(m, 1), "its manifest says"),
    "a negative size": (lambda m: set_size(m, -1), "no size"),
    "a size that is no number": (lambda m: set_size(m, "1"), "no size"),
    "a newer archive": (lambda m: m.update(format=2), "format 2"),
    "a newer entry": (lambda m: m["entries"][0].update(format=2), "another version"),
    "another field": (lambda m: m.update(run="rm"), "other fields"),
    "no list": (lambda m: m.update(entries={}), "not lists"),
    "no entry": (lambda m: m["entries"].append(None), "not a mapping"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_even_when_signed(archive: Path, attack: str) -> None:
    """The key may have been stolen, or the user may have said --trust: paths and sizes are checked anyway."""
    change, why = ATTACKS[attack]
    header, blobs = taken_apart(archive)
    change(header["manifest"])
    put_together(archive, header, blobs, a_store(archive.parent).signer)
    refused(archive, why)
    put_together(archive, header, blobs, SharedKey(b"t" * 32))
    refused(archive, why, trust=True)


def test_blobs_that_changed_places_are_refused(archive: Path) -> None:
    header, blobs = taken_apart(archive)
    header["manifest"]["blobs"].reverse()
    put_together(archive, header, blobs, a_store(archive.parent).signer)
    refused(archive, "has other bytes")


def test_a_manifest_longer_than_the_file_is_not_read(archive: Path) -> None:
    archive.write_bytes(MAGIC + (1 << 62).to_bytes(8, "big"))
    refused(archive, "more than there is")


many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(data=st.binary(max_size=80), mangle=st.sampled_from(["raw", "header", "manifest"]))
def test_any_bytes_are_refused_and_nothing_else_is_raised(tmp_path: Path, data: bytes, mangle: str) -> None:
    header = {"manifest": [data.hex()], "signature": {}} if mangle == "manifest" else data.hex()
    body = data if mangle == "raw" else MAGIC + len(canonical_json(header)).to_bytes(8, "big") + canonical_json(header)
    (tmp_path / "file").write_bytes(body)
    refused(tmp_path / "file", "file", trust=True)


@many
@given(data=st.data(), blobs=st.sampled_from(["as they were", "none", "twice"]))
def test_any_manifest_is_refused_or_brings_what_it_says(archive: Path, data: st.DataObject, blobs: str) -> None:
    """Signed by us, and still: no other exception, no file outside the root, nothing half imported."""
    if not (archive.parent / "good").exists():
        shutil.copy(archive, archive.parent / "good")
    shutil.copy(archive.parent / "good", archive)
    header, tail = taken_apart(archive)
    header["manifest"] = data.draw(tampered(header["manifest"]))
    tail = {"none": b"", "twice": tail * 2}.get(blobs, tail)
    put_together(archive, header, tail, a_store(archive.parent).signer)
    before = {path.name for path in archive.parent.iterdir()}
    store = elsewhere(archive)
    try:
        imported = import_archive(store, archive)
    except ArchiveRefused:
        assert not store.layout.root.exists()
    else:
        assert {row.key for row in store.list()} == set(imported.keys)
        assert all(isinstance(store.verify(key), Loaded) for key in imported.keys)
        shutil.rmtree(store.layout.root, ignore_errors=True)
    assert {path.name for path in archive.parent.iterdir()} == before


def test_a_name_twice_in_the_header_is_refused(archive: Path) -> None:
    """JSON's readers disagree on which of two counts."""
    header, tail = taken_apart(archive)
    body = canonical_json(header)
    for name in (b'"blobs":', b'"entries":', b'"manifest":', b'"signature":', b'"digest":'):
        twice = body.replace(name, name + b"0," + name, 1)
        archive.write_bytes(MAGIC + len(twice).to_bytes(8, "big") + twice + tail)
        refused(archive, "not in canonical form", trust=True)


@pytest.mark.parametrize("length", [(1 << 64) - 1, 256 << 20, (256 << 20) + 1, 1 << 40])
def test_a_header_that_says_it_is_huge_is_not_read(archive: Path, length: int) -> None:
    """A huge header is not read even if the file is as huge: a hole costs its maker nothing."""
    with archive.open("r+b") as file:
        file.seek(len(MAGIC))
        file.write(length.to_bytes(8, "big"))
        if length > 256 << 20:
            os.truncate(archive, 1 << 41)
    refused(archive, "is damaged: its manifest would be", trust=True)


def test_an_import_costs_what_is_in_the_file(archive: Path) -> None:
    """Two hundred roles of one blob take its room once: in memory, and on the disk."""
    store = a_store(archive.parent)
    blobs = dict.fromkeys(map(str, range(200)), b"x" * 1_000_000)
    entry = saved(store, blobs, number=3)
    size = export_archive(store, archive, [entry.key])
    assert size < 2_000_000
    target = elsewhere(archive)
    tracemalloc.start()
    try:
        import_archive(target, archive)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40_000_000
    assert sum(path.stat().st_size for path in target.layout.root.rglob("*") if path.is_file()) < 3_000_000


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    refused(tmp_path / "nothing", "there is no file")


def test_an_entry_that_does_not_load_is_not_exported(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    store.layout.blob(entry.blobs["plan"].digest).write_bytes(b"?")
    for key, why in ((entry.key, "blob corrupt"), ("0" * 64, "absent")):
        with pytest.raises(CacheError, match=why):
            export_archive(store, tmp_path / "file", [key])
    assert not list(tmp_path.glob("*file*"))


def test_a_full_disk_leaves_no_half_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(tmp_path)
    entry = saved(store)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        export_archive(store, tmp_path / "file", [entry.key])
    assert not list(tmp_path.glob("*file*"))


def test_a_store_that_takes_nothing_says_so(archive: Path) -> None:
    store = elsewhere(archive)
    (archive.parent / "elsewhere").write_text("a file")
    with pytest.raises(CacheError, match="was not saved"):
        import_archive(store, archive)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a private key and of its public key."""
    return tmp_path / "pair.key", create_key_pair(tmp_path / "pair.key")


def exported_with(key: Path, folder: Path) -> Path:
    store = a_store(folder, signing_key_file=key)
    export_archive(store, folder / "file", [saved(store).key])
    return folder / "file"


def test_an_archive_of_a_private_key_is_taken_by_who_has_the_public_one(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    archive = exported_with(pair[0], tmp_path)
    reader = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=pair[1])
    imported = import_archive(reader, archive)
    assert imported.signed
    assert all(isinstance(elsewhere(archive, "other.key").load(key), Loaded) for key in imported.keys), "ours now"


def test_a_public_key_cannot_sign_an_export(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """The archives that they export are signed with their own key."""
    archive = exported_with(pair[1], tmp_path)
    assert taken_apart(archive)[0]["signature"]["scheme"] == "hmac-sha256"
    reader = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=pair[1])
    with pytest.raises(ArchiveRefused, match="not signed by a key that you hold"):
        import_archive(reader, archive)


def test_an_archive_of_a_shared_key_is_taken_by_who_shares_it(tmp_path: Path) -> None:
    (tmp_path / "shared.key").write_text("ab" * 32)
    (tmp_path / "shared.key").chmod(0o600)
    archive = exported_with(tmp_path / "shared.key", tmp_path)
    reader = Store.open(
        tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=tmp_path / "shared.key"
    )
    assert import_archive(reader, archive).signed


@pytest.mark.parametrize("other", ["another pair", "no key"])
def test_an_archive_of_a_private_key_is_refused_without_its_public_key(
    tmp_path: Path, pair: tuple[Path, Path], other: str
) -> None:
    archive = exported_with(pair[0], tmp_path)
    key = create_key_pair(tmp_path / "another.key") if other == "another pair" else None
    reader = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=key)
    with pytest.raises(ArchiveRefused, match="Configure the public key of whoever made it"):
        import_archive(reader, archive)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_a_flipped_bit_under_a_private_keys_signature_is_refused(
    tmp_path: Path, pair: tuple[Path, Path], trust: bool
) -> None:
    archive = exported_with(pair[0], tmp_path)
    header, blobs = taken_apart(archive)
    value = header["signature"]["value"]
    header["signature"]["value"] = f"{int(value[0], 16) ^ 1:x}" + value[1:]
    put_together(archive, header, blobs, None)
    reader = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=pair[1])
    with pytest.raises(ArchiveRefused, match="damaged, or forged"):
        import_archive(reader, archive, trust=trust)
    assert not (tmp_path / "elsewhere").exists()


def a_link(path: Path) -> None:
    path.with_name("precious").write_text("precious")
    path.symlink_to(path.with_name("precious"))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a link": a_link,
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("there", NO_FILES)
def test_an_export_replaces_only_a_regular_file(tmp_path: Path, there: str) -> None:
    store = a_store(tmp_path)
    entry = saved(store)
    NO_FILES[there](tmp_path / "file")
    before = {path.name: os.lstat(path) for path in tmp_path.iterdir()}
    with pytest.raises(CacheError, match="is not a regular file"):
        export_archive(store, tmp_path / "file", [entry.key])
    assert {path.name: os.lstat(path) for path in tmp_path.iterdir()} == before


def origin_of(store: Store, key: str) -> list[tuple[str, Verdict]]:
    """Return the keys that signed an entry before it was imported, and what a store makes of them."""
    found = store.load(key)
    assert isinstance(found, Loaded)
    bare = canonical_json(to_document(replace(found.entry, origin=())))
    return [(each["key_id"], store.keyring.verify("entry", bare, each)) for each in found.entry.origin]


def test_the_original_signature_stays_from_import_to_import(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """The signatures of the maker and of every exporter stay, however often the entry is exported."""
    archive = exported_with(pair[0], tmp_path)
    image, maker = read_signing_key(pair[1]).key_id, a_store(tmp_path).signer.key_id
    (key,) = [row.key for row in a_store(tmp_path).list()]
    second = Store.open(tmp_path / "second", key_file=tmp_path / "second.key", signing_key_file=pair[1])
    assert import_archive(second, archive).signed
    assert origin_of(second, key) == [(maker, Verdict.UNKNOWN_KEY), (image, Verdict.GOOD)]
    export_archive(second, tmp_path / "again", [key])
    third = Store.open(tmp_path / "third", key_file=tmp_path / "third.key", signing_key_file=pair[1])
    import_archive(third, tmp_path / "again", trust=True)
    assert origin_of(third, key) == [
        (maker, Verdict.UNKNOWN_KEY),
        (image, Verdict.GOOD),
        (second.signer.key_id, Verdict.UNKNOWN_KEY),
    ]


@pytest.mark.parametrize("trust", [False, True])
def test_an_original_signature_that_is_forged_is_refused(tmp_path: Path, pair: tuple[Path, Path], trust: bool) -> None:
    """Though the archive is signed: its maker says that a key of ours has signed what it has not."""
    archive = exported_with(pair[0], tmp_path)
    header, blobs = taken_apart(archive)
    header["manifest"]["entries"][0]["notes"] = {"better": True}
    signer = read_signing_key(pair[0])
    assert isinstance(signer, PrivateKey)
    put_together(archive, header, blobs, signer)
    reader = Store.open(tmp_path / "elsewhere", key_file=tmp_path / "other.key", signing_key_file=pair[1])
    with pytest.raises(ArchiveRefused, match="of yours signed it, which it did not"):
        import_archive(reader, archive, trust=trust)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("origin", [{}, [1], [{}], [{"scheme": "x", "key_id": "y", "value": "z"}], [{}] * 100])
def test_an_origin_that_is_no_list_of_signatures_is_refused(archive: Path, origin: Any) -> None:
    header, blobs = taken_apart(archive)
    header["manifest"]["entries"][0]["origin"] = origin
    put_together(archive, header, blobs, a_store(archive.parent).signer)
    refused(archive, "origin")
