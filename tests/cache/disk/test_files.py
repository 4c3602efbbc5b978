"""Files: in which order they reach the disk, and what is not followed or waited for."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path

import pytest

from piecegraph.cache.disk.files import (
    NotARegularFile,
    is_being_written,
    make_folders_above,
    read_regular,
    sync_folder,
    write_atomically,
)
from tests.cache.cache_roots import a_store, saved


def test_an_entry_reaches_the_disk_after_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, then names, then the folder; so a power cut at any point leaves no entry without its blobs."""
    store = a_store(tmp_path)
    saved(store, {"plan": b"other"}, eps=3.0)  # folders and key are there
    calls: list[str] = []
    really_fsync, really_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append(f"sync {'temp' if name.suffix == '.tmp' else name.name}")
        really_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        calls.append(f"name in {target.parent.name}")
        really_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    saved(store)
    one_blob = ["sync temp", "name in blobs"]
    assert calls == [*one_blob, *one_blob, "sync blobs", "sync temp", "name in entries", "sync entries"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: really_write(fd, data[:3]))
    write_atomically(tmp_path / "file", b"0123456789", tmp_path)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_no_more_is_read_than_tells_that_it_is_too_much(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert len(read_regular(tmp_path / "file", 10)) == 11
    assert len(read_regular(tmp_path / "file", 100)) == 100


def test_links_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "pipe", tmp_path):
        with pytest.raises(NotARegularFile):
            read_regular(path, 10)


def test_a_temp_file_is_locked_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    really_write = os.write

    def write(fd: int, data: bytes) -> int:
        seen.extend(is_being_written(path) for path in tmp_path.glob("*.tmp"))
        return really_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    write_atomically(tmp_path / "file", b"x", tmp_path)
    assert seen == [True]
    assert not is_being_written(tmp_path / "file")
    assert not is_being_written(tmp_path / "nothing")


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, is_error in ((errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)):
        monkeypatch.setattr(os, "fsync", partial(fail, number))
        with pytest.raises(OSError, match="fsync") if is_error else contextlib.nullcontext():
            sync_folder(tmp_path)


def fail(number: int, _: int) -> None:
    raise OSError(number, "fsync")


def test_folders_above_a_file_are_made_for_the_user_alone(tmp_path: Path) -> None:
    for _ in range(2):
        make_folders_above(tmp_path / "a" / "b" / "file")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    assert not (tmp_path / "a" / "b" / "file").exists()
