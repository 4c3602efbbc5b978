"""The time an entry was last used: the modification time of an empty file, since access times are often disabled."""

from __future__ import annotations

import contextlib
import os

from piecegraph.cache.disk.layout import Layout
from piecegraph.cache.store.entry_file import EntryFile


def stamp(layout: Layout, key: str, now: float, mode: int = 0o600) -> None:
    """Record that the entry was used `now`, in seconds since 1970.

    Raises nothing: a read-only cache has no order of use.
    """
    path = layout.stamp(key)
    with contextlib.suppress(OSError):
        try:
            os.utime(path, (now, now), follow_symlinks=False)
        except FileNotFoundError:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(path, flags, mode))
            os.utime(path, (now, now), follow_symlinks=False)


def last_used(layout: Layout, file: EntryFile, now: float) -> float:
    """Return when an entry was last used, in seconds since 1970 and never after `now`.

    If a clock went back, what it stamped before counts as just used. An entry without a stamp (a copied cache) was last
    used when it was made; an entry that cannot be read, never.
    """
    try:
        found = os.stat(layout.stamp(file.key), follow_symlinks=False).st_mtime
    except OSError:
        found = float(file.entry.created) if file.entry is not None else 0.0
    return min(found, now)
