"""The disk usage of a cache, by folder."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.disk.files import scan_folder
from piecegraph.cache.disk.layout import Layout


@dataclass(frozen=True, slots=True)
class Room:
    files: int
    bytes: int  # of their contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    entries: Room
    blobs: Room
    quarantine: Room
    temp: Room  # being written, or left by killed writers
    other: Room  # stamps, locks, the record of events

    @property
    def total_bytes(self) -> int:
        return sum(room.bytes for room in (self.entries, self.blobs, self.quarantine, self.temp, self.other))


def usage(layout: Layout) -> Usage:
    """Return the present usage; files that vanish meanwhile, or cannot be examined, are not counted.

    Raises PermissionError for a folder.
    """
    other = (_room(layout.used), _room(layout.locks), _file(layout.counters))
    return Usage(
        entries=_room(layout.entries),
        blobs=_room(layout.blobs),
        quarantine=_room(layout.quarantine),
        temp=_room(layout.temp),
        other=Room(sum(room.files for room in other), sum(room.bytes for room in other)),
    )


def _room(folder: Path) -> Room:
    sizes = []
    for item in scan_folder(folder):
        with contextlib.suppress(OSError):  # it is gone, or one that the disk does not give us
            sizes.append(item.stat(follow_symlinks=False).st_size)
    return Room(len(sizes), sum(sizes))


def _file(path: Path) -> Room:
    try:
        return Room(1, os.lstat(path).st_size)
    except OSError:
        return Room(0, 0)
