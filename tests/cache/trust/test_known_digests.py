"""Digests that are known: hashed once, and again whenever the file may be another."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.trust import known_digests
from piecegraph.cache.trust.keyring import Keyring
from piecegraph.cache.trust.known_digests import KnownDigests
from piecegraph.cache.trust.shared_key import SharedKey

MINE = SharedKey(b"m" * 32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"weights")
    return tmp_path / "file"


def digests(file: Path, key: SharedKey = MINE) -> KnownDigests:
    return KnownDigests(file.parent / "user" / "digests.json", Keyring(key))


def known(file: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the next process knows the digest of `file`, which is right either way."""
    hashed = []
    really = hashlib.file_digest

    def noted(*args: Any) -> Any:
        hashed.append(args)
        return really(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", noted)
        assert digests(file).digest(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    return not hashed


def keep(file: Path) -> None:
    found = digests(file)
    found.digest(file)
    found.keep(MINE)


def test_a_file_is_hashed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not known(file, monkeypatch)
    keep(file)
    assert known(file, monkeypatch)
    assert (file.parent / "user" / "digests.json").stat().st_mode & 0o777 == 0o600


def test_a_file_is_known_after_its_folder_is_renamed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "scratch").mkdir()
    file.rename(file.parent / "scratch" / "file")
    keep(file.parent / "scratch" / "file")
    (file.parent / "scratch").rename(file.parent / "final")
    assert known(file.parent / "final" / "file", monkeypatch)


def test_other_bytes_with_size_and_time_set_back_are_hashed_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(file)
    status = file.stat()
    file.write_bytes(b"Weights")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not known(file, monkeypatch)


def test_another_file_under_its_name_is_hashed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(file)
    status = file.stat()
    (file.parent / "other").write_bytes(b"Weights")
    os.utime(file.parent / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (file.parent / "other").rename(file)
    assert not known(file, monkeypatch)


@pytest.mark.parametrize("damage", ["a bit", "the end", "another key", "a link", "no JSON"])
def test_digests_that_no_key_of_ours_has_signed_do_not_count(
    file: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    keep(file)
    path = file.parent / "user" / "digests.json"
    data = path.read_bytes()
    if damage == "another key":
        path.unlink()
        found = digests(file, SharedKey(b"t" * 32))
        found.digest(file)
        found.keep(SharedKey(b"t" * 32))
    elif damage == "a link":
        path.rename(path.with_name("real"))
        path.symlink_to(path.with_name("real"))
    else:
        at = data.index(b'"digest":"') + 12
        other = {"a bit": data[:at] + b"%x" % (int(data[at : at + 1], 16) ^ 1) + data[at + 1 :], "the end": data[:-9]}
        path.write_bytes(other.get(damage, b"\xff\xfe"))
    assert not known(file, monkeypatch)


def test_the_known_digests_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests that were computed last stay."""
    monkeypatch.setattr(known_digests, "MAX_FILES", 3)
    for number in range(6):
        path = file.parent / f"{number}"
        path.write_bytes(b"%d" % number)
        found = digests(file)
        found.digest(path)
        found.keep(MINE)
        assert known(path, monkeypatch)
    assert len(digests(file)._known) == 3


def test_an_unwritable_file_of_digests_raises_nothing(file: Path) -> None:
    (file.parent / "user").write_text("a file")
    keep(file)
