"""Listings of entries that a private key signed are quick with the signed list, and right without it."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Store
from piecegraph.cache.trust import signed_list
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.cache.trust.key_pair import PublicKey
from piecegraph.cache.trust.signed_list import read_signed_list
from tests.cache.cache_roots import a_store, loads, saved


@pytest.fixture
def publisher(tmp_path: Path) -> Store:
    create_key_pair(tmp_path / "image.key")
    return a_store(tmp_path, signing_key_file=tmp_path / "image.key", publish=True)


@pytest.fixture
def entries(publisher: Store) -> list[Entry]:
    return [saved(publisher, eps=number) for number in range(20)]


@pytest.fixture
def reader(tmp_path: Path, entries: list[Entry]) -> Store:
    return a_store(tmp_path, signing_key_file=tmp_path / "image.key.pub")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the signatures that are verified, by kind."""
    counts: Counter[str] = Counter()
    really = PublicKey.verifies

    def counting(self: PublicKey, what: str, data: bytes, value: str) -> bool:
        counts[what] += 1
        return really(self, what, data, value)

    monkeypatch.setattr(PublicKey, "verifies", counting)
    return counts


def states(store: Store) -> set[str]:
    return {row.state for row in store.list()}


def test_a_listing_verifies_one_signature(reader: Store, verified: Counter[str]) -> None:
    assert states(reader) == {"complete"}
    assert verified == {"list": 1}


def test_a_load_verifies_the_entrys_own(reader: Store, entries: list[Entry], verified: Counter[str]) -> None:
    assert loads(reader, entries[0])
    assert verified == {"entry": 1}


def test_an_entry_that_is_not_in_it_is_verified_by_itself(
    publisher: Store, reader: Store, verified: Counter[str]
) -> None:
    """Saved by a process whose list was overwritten by another's."""
    before = publisher.layout.signed_list.read_bytes()
    saved(publisher, eps=0.5)
    publisher.layout.signed_list.write_bytes(before)
    verified.clear()
    assert states(reader) == {"complete"}
    assert verified == {"list": 1, "entry": 1}


def flip(path: Path, at: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("at", [2, 40, 700, -30, -1])
def test_a_damaged_list_is_not_believed(reader: Store, verified: Counter[str], at: int) -> None:
    flip(reader.layout.signed_list, at)
    assert read_signed_list(reader.layout, reader.keyring) == {}
    verified.clear()
    assert states(reader) == {"complete"}
    assert verified["entry"] == 20


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"digests":[],"signature":null}', b"[" * 100_000])
def test_a_file_that_is_not_a_signed_list_is_ignored(reader: Store, content: bytes) -> None:
    reader.layout.signed_list.write_bytes(content)
    assert read_signed_list(reader.layout, reader.keyring) == {}
    assert states(reader) == {"complete"}


def test_a_damaged_entry_is_not_covered_by_it(reader: Store, entries: list[Entry]) -> None:
    """Whichever byte it is, of the signature too."""
    path = reader.layout.entry(entries[0].key)
    good = path.read_bytes()
    for at in (20, len(good) // 2, len(good) - 10):
        path.write_bytes(good)
        flip(path, at)
        bad = [row.key for row in reader.list() if row.file.problem is not None]
        assert bad == [entries[0].key]


def test_an_entry_under_another_key_is_not_covered_by_it(reader: Store, entries: list[Entry]) -> None:
    one, other = (reader.layout.entry(entry.key) for entry in entries[:2])
    one.write_bytes(other.read_bytes())
    assert [row.state for row in reader.list() if row.key == entries[0].key] == ["corrupt"]


@pytest.mark.parametrize("by", ["another pair", "the reader", "the digest alone"])
def test_a_forged_list_covers_nothing(tmp_path: Path, reader: Store, entries: list[Entry], by: str) -> None:
    path = reader.layout.entry(entries[0].key)
    file: Any = parse_canonical(path.read_bytes())
    file["entry"]["notes"] = {"better": True}
    path.write_bytes(canonical_json(file))
    listed: Any = parse_canonical(reader.layout.signed_list.read_bytes())
    listed["digests"][entries[0].key] = signed_list.file_digest(path.read_bytes())
    if by == "another pair":
        create_key_pair(tmp_path / "other.key")
        other = a_store(tmp_path, signing_key_file=tmp_path / "other.key", publish=True).signer
        listed["signature"] = other.sign("list", canonical_json(listed["digests"]))
    elif by == "the reader":
        listed["signature"] = reader.signer.sign("entry", canonical_json(listed["digests"]))
    reader.layout.signed_list.write_bytes(canonical_json(listed))
    assert {row.key: row.state for row in reader.list()}[entries[0].key] == "forged"


def test_it_names_what_is_there(publisher: Store, entries: list[Entry]) -> None:
    """An entry that went is dropped with the next save."""
    assert publisher.delete(entries[0].key)
    new = saved(publisher, eps=0.5)
    named = set(read_signed_list(publisher.layout, publisher.keyring))
    assert named == {entry.key for entry in entries[1:]} | {new.key}
    assert publisher.layout.signed_list.stat().st_mode & 0o777 == 0o644


def test_a_list_that_cannot_be_written_costs_nothing_but_time(
    publisher: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(signed_list, "write_atomically", fail)
    assert loads(reader, saved(publisher, eps=0.5))
    assert states(reader) == {"complete"}


def test_a_shared_key_has_none(tmp_path: Path) -> None:
    (tmp_path / "shared.key").write_text("ab" * 32)
    (tmp_path / "shared.key").chmod(0o600)
    store = a_store(tmp_path, signing_key_file=tmp_path / "shared.key", publish=True)
    saved(store)
    assert not store.layout.signed_list.exists()
