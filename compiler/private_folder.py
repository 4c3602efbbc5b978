"""A folder of this process's own, for files that it is about to load code from: 0700, and gone when it ends."""

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
from pathlib import Path
from typing import IO

from piecegraph.paths import cache_root

_PREFIX = "piecegraph-of-"
_HELD = "held"
"""A file in each such root that its process has locked for as long as it lives."""

_serial = itertools.count()


def private_folder(name: str) -> Path:
    """A new, empty folder. It lives as long as the process: what was loaded from it may be looked up again."""
    folder = _root(os.getpid()) / f"{next(_serial)}-{name}"
    folder.mkdir(mode=0o700)
    return folder


@functools.cache
def _root(pid: int) -> Path:
    """Of this process and not of one it was forked from."""
    parent = _parent()
    _sweep(parent)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
    held = _hold(root)

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(root, ignore_errors=True)
            held.close()

    atexit.register(remove)
    return root


def _parent() -> Path:
    """Where temporary files go; the cache's root where that is mounted so that no code runs from it, or where others
    may put another folder in the place of ours."""
    temporary = Path(tempfile.gettempdir())
    mode = temporary.stat().st_mode
    is_guarded = not mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(mode & stat.S_ISVTX)
    if is_guarded and not os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return temporary
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _hold(root: Path) -> IO[bytes]:
    """It is locked before it has its name, so nobody sees it without."""
    fresh = root / "fresh"
    file = fresh.open("wb")
    with contextlib.suppress(OSError):  # where nothing can be locked, nothing is swept
        fcntl.flock(file, fcntl.LOCK_EX)
    fresh.rename(root / _HELD)
    return file


def _sweep(parent: Path) -> None:
    """Remove what processes of this user left that were killed: 150 MB each, where they compiled C++."""
    for root in parent.glob(f"{_PREFIX}*"):
        try:
            if root.lstat().st_uid != os.geteuid():
                continue
            with (root / _HELD).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:  # somebody lives there, or is just moving in or out
            continue
