"""Blobs: bytes under the name of their sha256, checked each time they are read."""

from __future__ import annotations

import enum
import errno
import hashlib
import os

from piecegraph.cache.entry import BlobRef
from piecegraph.cache.files import NotARegularFile, read_regular, write_atomically
from piecegraph.cache.layout import Layout
from piecegraph.cache.quarantine import quarantine

OWNER_ONLY = 0o600


class BlobTrouble(enum.Enum):
    MISSING = "missing"
    CORRUPT = "corrupt"  # other bytes, another length, or no file at all under the name


def get_blob(layout: Layout, ref: BlobRef) -> bytes | BlobTrouble:
    """The bytes, after their digest was found right; they never leave here otherwise. Raises OSError (EIO, EACCES)."""
    try:
        data = read_regular(layout.blob(ref.digest), ref.size)
    except (FileNotFoundError, NotADirectoryError):
        return BlobTrouble.MISSING
    except NotARegularFile:
        return BlobTrouble.CORRUPT
    right = len(data) == ref.size and hashlib.sha256(data).hexdigest() == ref.digest
    return data if right else BlobTrouble.CORRUPT


def put_blob(layout: Layout, data: bytes, mode: int = OWNER_ONLY) -> bool:
    """Store `data`; False where it was there already, which makes it fresh for `collect`, and readable for all that
    `mode` says. Raises OSError.

    In either case its name is safe only once the folder is synced: who put it there may not have come to that.
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
