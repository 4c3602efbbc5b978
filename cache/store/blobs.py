"""Blobs: bytes stored under their sha256, checked each time they are read."""

from __future__ import annotations

import enum
import errno
import hashlib
import os

from piecegraph.cache.disk.files import NotARegularFile, read_regular, write_atomically
from piecegraph.cache.disk.layout import Layout
from piecegraph.cache.store.entry import BlobRef
from piecegraph.cache.trust.quarantine import quarantine

OWNER_ONLY = 0o600


class BlobError(enum.Enum):
    MISSING = "missing"
    CORRUPT = "corrupt"  # other bytes, another length, or no file at all under the name


def get_blob(layout: Layout, ref: BlobRef) -> bytes | BlobError:
    """Return the bytes if their digest is right, else what is wrong. Raises OSError (EIO, EACCES)."""
    try:
        data = read_regular(layout.blob(ref.digest), ref.size)
    except (FileNotFoundError, NotADirectoryError):
        return BlobError.MISSING
    except NotARegularFile:
        return BlobError.CORRUPT
    right = len(data) == ref.size and hashlib.sha256(data).hexdigest() == ref.digest
    return data if right else BlobError.CORRUPT


def put_blob(layout: Layout, data: bytes, mode: int = OWNER_ONLY) -> bool:
    """Store `data`, and return False if it was there already.

    An existing blob becomes fresh for `collect`, and readable for those that `mode` includes. In either case its name
    is durable only once the folder is synced: its first writer may have died before that. Raises OSError.
    """
    ref = BlobRef.of(data)
    path = layout.blob(ref.digest)
    try:
        there = get_blob(layout, ref) == data
    except OSError:
        there = False
    if there:
        try:
            os.utime(path)
            if mode != OWNER_ONLY:
                os.chmod(path, mode)
            return False
        except OSError as error:
            if error.errno != errno.ENOENT:  # collected since we looked: written again below
                raise
    if path.is_dir() and not path.is_symlink():
        quarantine(layout, path, "blob")
    write_atomically(path, data, layout.temp, mode)
    return True
