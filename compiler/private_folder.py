"""A folder of this process's own, for files that it is about to load code from: 0700, and gone when it ends."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path

from piecegraph.paths import cache_root

_serial = itertools.count()


def private_folder(name: str) -> Path:
    """A new, empty folder. It lives as long as the process: what was loaded from it may be looked up again."""
    folder = _root(os.getpid()) / f"{next(_serial)}-{name}"
    folder.mkdir(mode=0o700)
    return folder


@functools.cache
def _root(pid: int) -> Path:
    """Of this process and not of one it was forked from."""
    root = Path(tempfile.mkdtemp(prefix="piecegraph-", dir=_parent()))  # 0700
    atexit.register(lambda: shutil.rmtree(root, ignore_errors=True) if os.getpid() == pid else None)
    return root


def _parent() -> Path:
    """Where temporary files go; the cache's root where that is mounted so that no code runs from it."""
    temporary = Path(tempfile.gettempdir())
    if not os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return temporary
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root
