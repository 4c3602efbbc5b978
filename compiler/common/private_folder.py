"""A folder that only this process uses, for files that it will load code from: mode 0700, removed at exit."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from piecegraph.paths import cache_root

_PREFIX = "piecegraph-of-"
_HELD = "held"
"""The file in each root folder that the owning process keeps locked while it lives."""

_FRESH = "fresh"
_UNFINISHED_S = 600.0

_serial = itertools.count()


def private_folder(name: str) -> Path:
    """Return a new, empty folder that exists until the process ends: code loaded from it may be looked up again."""
    folder = _root(os.getpid()) / f"{next(_serial)}-{name}"
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new, empty folder and remove it afterwards; if this process is killed first, a later one removes it."""
    folder = private_folder("scratch")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def sweep_folders() -> None:
    """Remove the folders of this user's killed processes, once in this process. Raises nothing."""
    with contextlib.suppress(OSError):
        _sweep(_parent())


@functools.cache
def _root(pid: int) -> Path:
    """Return the root folder of process `pid`; a forked child has a root of its own."""
    sweep_folders()
    parent = _parent()
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
    held = _hold(root)

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(root, ignore_errors=True)
            held.close()

    atexit.register(remove)
    return root


def _parent() -> Path:
    """Return the folder for temporary files, or the root of the cache where that folder is not safe to load code from.

    A folder is not safe if it is mounted noexec, or if other users may replace a folder in it.
    """
    temporary = Path(tempfile.gettempdir())
    mode = temporary.stat().st_mode
    is_guarded = not mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(mode & stat.S_ISVTX)
    if is_guarded and not os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return temporary
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _hold(root: Path) -> IO[bytes]:
    """Create and lock the held file of `root`. It is locked before it gets its name, so it is never seen unlocked."""
    fresh = root / _FRESH
    file = fresh.open("wb")
    with contextlib.suppress(OSError):  # where nothing can be locked, nothing is swept
        fcntl.flock(file, fcntl.LOCK_EX)
    fresh.rename(root / _HELD)
    return file


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user left: 150 MB each, where they compiled C++."""
    for root in parent.glob(f"{_PREFIX}*"):
        try:
            status = root.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            if not (root / _HELD).exists():
                _sweep_unfinished(root, time.time() - status.st_mtime)
                continue
            with (root / _HELD).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:  # its process lives, or is just starting or ending
            continue


def _sweep_unfinished(root: Path, age_s: float) -> None:
    """Remove a folder whose process was killed before it locked the held file, so that nothing else is in it yet.

    Raises `OSError` where something is in the folder.
    """
    if age_s < _UNFINISHED_S:
        return
    with contextlib.suppress(FileNotFoundError):
        (root / _FRESH).unlink()
    root.rmdir()  # an empty one, or none
