"""Counters of cache events: one line an event, appended in one write, summed when they are read.

Each line begins with its checksum. The counters are for people and are not trusted, but a bad disk cannot invent them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecegraph.cache.disk.files import read_regular, write_all

MAX_COUNTERS_BYTES = 16 << 20
"""The size of the file beyond which no event is recorded (about 100,000 events); `cache stats` then reports that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The sums of all events of a root, by all processes."""

    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)  # by `MissReason` value
    quarantined: int = 0
    saves: int = 0
    seconds_saved: float = 0.0  # what was not compiled took that long when it was
    hits_by_key: Mapping[str, int] = field(default_factory=dict)
    unreadable: int = 0  # lines that say nothing: torn by a crash, or damaged
    full: bool = False  # events are missing at the end


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one root. Recording never raises: a cache that cannot count still caches."""

    path: Path
    mode: int = 0o600

    def hit(self, key: str, seconds_saved: float) -> None:
        self._append({"event": "hit", "key": key, "seconds": round(seconds_saved, 3)})

    def miss(self, key: str, reason: str) -> None:
        self._append({"event": "miss", "key": key, "reason": reason})

    def quarantined(self, key: str, kind: str) -> None:
        self._append({"event": "quarantined", "key": key, "kind": kind})

    def saved(self, key: str) -> None:
        self._append({"event": "saved", "key": key})

    def _append(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            fd = os.open(self.path, flags, self.mode)
            try:
                if _can_append(os.fstat(fd)):
                    write_all(fd, line)  # one write below a page: appended whole, between others' lines
            finally:
                os.close(fd)

    def clear(self) -> None:
        """Remove all events. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def read(self) -> Totals:
        """Return the sums, read without a lock; all zero if there is no file. Raises nothing."""
        try:
            data = read_regular(self.path, MAX_COUNTERS_BYTES + (1 << 16))
        except OSError:
            return Totals()
        hits: Counter[str] = Counter()
        misses: Counter[str] = Counter()
        others: Counter[str] = Counter()
        seconds = 0.0
        for line in data.removesuffix(b"\n").split(b"\n") if data else ():
            match _event(line):
                case {"event": "hit", "key": str(key), "seconds": float(saved) | int(saved)} if _is_duration(saved):
                    hits[key] += 1
                    seconds += saved
                case {"event": "miss", "reason": str(reason)}:
                    misses[reason] += 1
                case {"event": "quarantined" | "saved" as event}:
                    others[event] += 1
                case _:
                    others["unreadable"] += 1
        return Totals(
            hits=hits.total(),
            misses=dict(misses),
            quarantined=others["quarantined"],
            saves=others["saved"],
            seconds_saved=seconds,
            hits_by_key=dict(hits),
            unreadable=others["unreadable"],
            full=len(data) >= MAX_COUNTERS_BYTES,
        )


def _is_duration(seconds: float) -> bool:
    return 0 <= seconds < 1e11


def _can_append(status: os.stat_result) -> bool:
    """Return whether a line may be appended: the file is regular, not full, and has no second name.

    A file with a second name is also somebody else's file, in whatever folder that name lies.
    """
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size < MAX_COUNTERS_BYTES


def _event(line: bytes) -> Any:
    """Return the event that `_append` wrote, or None."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
