from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.errors import CacheError
from piecegraph.tools.cache.terminal.place import Place, place
from tests.tools.cache.models import CacheCommand, save_piece


def test_what_decides_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(tmp_path, None) == Place(tmp_path, "--cache-dir")
    assert place(None, None) == Place(tmp_path / "cache", "PIECEGRAPH_CACHE_DIR")
    monkeypatch.delenv("PIECEGRAPH_CACHE_DIR")
    assert place(None, None).set_by == "the platform"


def test_the_environment_names_a_signing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(None, None).signing_key_file is None
    monkeypatch.setenv("PIECEGRAPH_SIGNING_KEY_FILE", str(tmp_path / "public"))
    assert place(None, None).signing_key_file == tmp_path / "public"
    assert place(None, tmp_path / "other").signing_key_file == tmp_path / "other"


def test_another_folder_is_one_option_away(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    save_piece(store, "one")
    assert len(cache.json("ls")) == 1
    assert cache.json("ls", "--cache-dir", str(tmp_path / "elsewhere")) == []
    assert "there is no cache at" in cache.err


def test_a_folder_that_others_may_write_is_refused_with_the_remedy(
    store: Store, cache: CacheCommand, cache_dir: Path
) -> None:
    save_piece(store, "one")
    cache_dir.chmod(0o777)
    assert cache("ls", code=1) == ""
    assert f"Run: chmod go-w {cache_dir}" in cache.err


@pytest.mark.parametrize("folder", ["entries", "blobs", "quarantine", "locks", "temp", "used"])
@pytest.mark.parametrize("leads_to", ["nowhere", "."])
def test_a_folder_that_is_a_link_is_refused_with_the_remedy(
    store: Store, cache: CacheCommand, cache_dir: Path, folder: str, leads_to: str
) -> None:
    """A link in place of any folder, dangling or not; what the message says to run is all there is to do."""
    save_piece(store, "one")
    place = cache_dir / "v1" / folder
    shutil.rmtree(place)
    place.symlink_to(cache_dir / leads_to)
    for command in ("gc", "du", "stats"):
        assert cache(command, code=1) == ""
        assert f"cache folder {place} is a symbolic link (to {cache_dir / leads_to}" in cache.err
        assert (", where nothing is)" in cache.err) == (leads_to == "nowhere")
    subprocess.run(shlex.split(cache.err.strip().rpartition("Run: ")[2]), check=True)
    for command in ("gc", "du", "stats"):
        cache(command)
    save_piece(store, "two")
    assert place.is_dir() and not place.is_symlink()


def test_another_users_cache_is_not_changed(store: Store, cache: CacheCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    key = save_piece(store, "one").key
    opened = Store.open(store.layout.root)
    opened.access = Access.READ_ONLY
    monkeypatch.setattr(Store, "open", lambda *args, **options: opened)
    for command in (["rm", key, "-y"], ["clear", "-y"], ["gc"], ["import", __file__], ["quarantine", "clear", "-y"]):
        assert cache(*command, code=1) == ""
        assert "belongs to another user and is only read" in cache.err
    assert cache.json("gc", "--dry-run")["entries"] == []


def test_a_disk_that_cannot_be_read_is_named(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> Store:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Store, "open", fails)
    with pytest.raises(CacheError, match=r"cache at .*cache \(set by PIECEGRAPH_CACHE_DIR\) cannot be read: .*error"):
        place(None, None).open()


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (["gc", "--max-size", "0"], "unlink"),
        (["rm", "KEY", "-y"], "unlink"),
        (["clear", "-y"], "unlink"),
        (["ls"], "scandir"),
        (["du"], "scandir"),
        (["show", "KEY"], "scandir"),
        (["quarantine", "ls"], "scandir"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_disk_that_is_only_read_or_fails_is_an_error_of_the_cache(
    command: list[str],
    call: str,
    store: Store,
    cache: CacheCommand,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = save_piece(store, "one").key

    def fails(path: Path, *rest: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, call, fails)
    assert cache(*(key if word == "KEY" else word for word in command), code=1) == ""
    assert f"error: the cache at {cache_dir} (set by PIECEGRAPH_CACHE_DIR) cannot be read, or changed: " in cache.err
    assert "Read-only file system" in cache.err
    assert "unexpected" not in cache.err


def test_an_error_of_another_disk_is_not_an_error_of_the_cache(
    cache: CacheCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("piecegraph.tools.cache.reading.path.emit", fails)
    cache("path", code=1)
    assert "error: writing failed: No space left on device" in cache.err
