"""Bad bytes are moved here: out of every reader's way, and kept for whoever wants to know what happened."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.files import entries_of, unlink_if_there
from piecegraph.cache.layout import Layout


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that was moved away. Never opened by us again."""

    name: str  # in the quarantine folder
    kind: str  # "entry", "blob" or "stamp"
    of: str  # the key or digest it was found under
    size: int  # bytes
    since: float  # seconds since 1970, when it was last changed


def quarantine(layout: Layout, path: Path, kind: str) -> bool:
    """Move `path`, whatever it is, into quarantine; False where that cannot be (gone, or a read-only disk)."""
    target = layout.quarantine / f"{kind}.{path.stem}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        os.rename(path, target)  # renames a link, not what it leads to
        return True
    return False


def remove(layout: Layout, path: Path, kind: str) -> bool:
    """Unlink `path`; a folder, which is none of ours, goes to quarantine. False if there was none. Raises OSError."""
    try:
        return unlink_if_there(path)
    except IsADirectoryError:
        return quarantine(layout, path, kind)


def quarantined(layout: Layout) -> tuple[Quarantined, ...]:
    """What lies there, oldest first."""
    found = []
    for item in entries_of(layout.quarantine):
        kind, _, rest = item.name.partition(".")
        with contextlib.suppress(OSError):
            status = item.stat(follow_symlinks=False)
            found.append(Quarantined(item.name, kind, rest.partition(".")[0], status.st_size, status.st_mtime))
    return tuple(sorted(found, key=lambda each: (each.since, each.name)))


def clear_quarantine(layout: Layout) -> int:
    """Remove all that lies there; how many were removed. Raises OSError."""
    removed = 0
    for item in list(entries_of(layout.quarantine)):
        if item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path)
        else:
            os.unlink(item.path)
        removed += 1
    return removed
