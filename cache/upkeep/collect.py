"""Garbage collection that is safe while others read and write: it removes files, and moves or rewrites none.

A reader that has opened a file can read it to its end; a later reader has a miss. A writer's blobs exist before the
entry that names them, so a blob that no entry names stays while it is fresh (`put_blob` makes a blob fresh again).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.disk.files import is_being_written, scan_folder, sync_folder, unlink_if_exists
from piecegraph.cache.disk.layout import Layout, is_digest
from piecegraph.cache.store.entry_file import EntryFile, MissReason, read_entry_file
from piecegraph.cache.store.single_flight import sweep_locks
from piecegraph.cache.store.stamps import last_used
from piecegraph.cache.trust.keyring import Keyring
from piecegraph.cache.trust.quarantine import remove

FRESH_S = 600.0
"""The seconds for which a blob counts as fresh. A save takes less, from its first blob to its entry."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection: what was removed, or would be in a dry run."""

    entries: tuple[str, ...]  # keys, longest unused first
    blobs: tuple[str, ...]  # digests
    temp_files: int  # of writers that were killed
    freed_bytes: int
    kept_bytes: int  # of entries and blobs that are left


@dataclass(frozen=True, slots=True)
class _Found:
    file: EntryFile
    last_used: float
    digests: frozenset[str]


def collect(
    layout: Layout,
    *,
    now: float,
    max_bytes: int | None = None,
    older_than_s: float | None = None,
    dry_run: bool = False,
    fresh_s: float = FRESH_S,
) -> Collected:
    """Remove files of killed writers, blobs that no entry names, entries unused for `older_than_s`, and the least
    recently used entries until `max_bytes` are left.

    `now` is in seconds since 1970, with which stamps are compared. Entries of other versions count like others. If an
    entry does not reveal which blobs it names, blobs that no other entry names stay. Such blobs do not count against
    `max_bytes`, nor do blobs that stay because they are fresh: removing more entries would not remove them. `fresh_s=0`
    also removes blobs that a writer may be about to name: its entry is a miss then. Raises PermissionError and the
    like; files that are gone already are not an error.
    """
    found = sorted(_entries(layout, now), key=lambda each: (each.last_used, each.file.key))
    blobs = {item.name: item.stat(follow_symlinks=False) for item in _present(layout.blobs) if is_digest(item.name)}
    fresh = {name for name, status in blobs.items() if abs(now - status.st_mtime) < fresh_s}
    sizes = {name: status.st_size for name, status in blobs.items()}
    total = sum(sizes.values()) + sum(each.file.size for each in found)

    named = Counter(digest for each in found for digest in each.digests)
    opaque = any(each.file.entry is None and each.file.problem is not MissReason.CORRUPT for each in found)
    orphans = [] if opaque else [name for name in sizes if not named[name] and name not in fresh]
    left = total - sum(sizes[name] for name in orphans)
    needed = sum(each.file.size for each in found) + sum(size for name, size in sizes.items() if named[name])
    doomed: list[_Found] = []
    dropped: list[str] = []
    for each in found:
        too_old = older_than_s is not None and now - each.last_used > older_than_s
        too_much = max_bytes is not None and needed > max_bytes
        if not too_old and not too_much:
            break  # the rest was used later
        doomed.append(each)
        named.subtract(each.digests)
        unnamed = [digest for digest in sorted(each.digests) if not named[digest] and digest in sizes]
        needed -= each.file.size + sum(sizes[digest] for digest in unnamed)
        gone = [] if opaque else [digest for digest in unnamed if digest not in fresh]
        dropped += gone
        left -= each.file.size + sum(sizes[digest] for digest in gone)

    removed = (*sorted(orphans), *dropped)
    if not dry_run:
        for each in doomed:  # entries first: an entry without its blobs would look damaged
            remove(layout, layout.entry(each.file.key), "entry")
            remove(layout, layout.stamp(each.file.key), "stamp")
        if removed:
            sync_folder(layout.entries)  # so that no entry comes back after a power cut without its blobs
        for digest in removed:
            _remove_unless_fresh(layout, digest, now, fresh_s)
    temp_files = _sweep(layout.temp, now, dry_run)
    if not dry_run:
        sweep_locks(layout)
    return Collected(tuple(each.file.key for each in doomed), removed, temp_files, total - left, left)


def collect_if_over(layout: Layout, *, now: float, max_bytes: int) -> Collected | None:
    """Collect if entries and blobs take more than `max_bytes`, else return None after looking at their sizes."""
    present = (*_present(layout.entries), *_present(layout.blobs))
    taken = sum(item.stat(follow_symlinks=False).st_size for item in present)
    return collect(layout, now=now, max_bytes=max_bytes) if taken > max_bytes else None


def _entries(layout: Layout, now: float) -> list[_Found]:
    """Return all entries. Whether they are trusted makes no difference to the space they take."""
    found = []
    for item in scan_folder(layout.entries):
        key = item.name.removesuffix(".json")
        if not item.name.endswith(".json") or not is_digest(key):
            continue
        file = read_entry_file(layout, key, Keyring())
        if file.problem is MissReason.ABSENT:
            continue
        refs = file.entry.blobs.values() if file.entry is not None else ()
        found.append(_Found(file, last_used(layout, file, now), frozenset(ref.digest for ref in refs)))
    return found


def _present(folder: Path) -> list[os.DirEntry[str]]:
    """Return the directory entries that still exist."""
    found = []
    for item in scan_folder(folder):
        with contextlib.suppress(FileNotFoundError):
            item.stat(follow_symlinks=False)  # remembered by the entry
            found.append(item)
    return found


def _remove_unless_fresh(layout: Layout, digest: str, now: float, fresh_s: float) -> None:
    """Remove a blob unless it is fresh: a writer may have come to need the blob since it was listed."""
    path = layout.blob(digest)
    with contextlib.suppress(FileNotFoundError):
        if abs(now - os.stat(path, follow_symlinks=False).st_mtime) >= fresh_s:
            remove(layout, path, "blob")


def _sweep(folder: Path, now: float, dry_run: bool) -> int:
    """Remove temp files whose writers are gone.

    A file with a time in the future counts as old too, because a clock may have gone back. Fresh files always stay: a
    writer creates its file a moment before it locks it.
    """
    swept = 0
    for item in _present(folder):
        old = abs(now - item.stat(follow_symlinks=False).st_mtime) >= FRESH_S
        if item.is_file(follow_symlinks=False) and old and not is_being_written(Path(item.path)):
            swept += dry_run or unlink_if_exists(Path(item.path))
    return swept
