"""The quarantine, where bad files are moved out of every reader's way and kept for inspection."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.disk.files import scan_folder, unlink_if_exists
from piecegraph.cache.disk.layout import Layout


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A file that was moved away, and that we never open again."""

    name: str  # in the quarantine folder
    kind: str  # "entry", "blob" or "stamp"
    of: str  # the key or digest it was found under
    size: int  # bytes
    since: float  # seconds since 1970, when it was last changed


def quarantine(layout: Layout, path: Path, kind: str) -> bool:
    """Move `path`, whatever it is, into quarantine; return False if that fails (it is gone, or a disk is read-only)."""
    target = layout.quarantine / f"{kind}.{path.stem}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        os.rename(path, target)  # renames a link, not what it leads to
        return True
    return False


def remove(layout: Layout, path: Path, kind: str) -> bool:
    """Unlink `path`, and return False if there is none. A folder, which is not ours, is quarantined. Raises OSError."""
    try:
        return unlink_if_exists(path)
    except IsADirectoryError:
        return quarantine(layout, path, kind)


def quarantined(layout: Layout) -> tuple[Quarantined, ...]:
    """Return the quarantined files, oldest first."""
    found = []
    for item in scan_folder(layout.quarantine):
        kind, _, rest = item.name.partition(".")
        with contextlib.suppress(OSError):
            status = item.stat(follow_symlinks=False)
            found.append(Quarantined(item.name, kind, rest.partition(".")[0], status.st_size, status.st_mtime))
    return tuple(sorted(found, key=lambda each: (each.since, each.name)))


def clear_quarantine(layout: Layout) -> int:
    """Remove all quarantined files, and return how many were removed. Raises OSError."""
    removed = 0
    for item in list(scan_folder(layout.quarantine)):
        if item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path)
        else:
            os.unlink(item.path)
        removed += 1
    return removed
