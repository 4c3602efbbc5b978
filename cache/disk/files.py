"""File operations of the store: read whole, write atomically, list a folder.

Note [temp files are locked while they are written]: a writer holds a kernel lock on its temp file until the file has
its final name, so a sweep can tell a file that is being written from one whose writer was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


class NotARegularFile(OSError):
    """The error that a link, a folder or a device is where a file of ours should be."""


def read_regular(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file, or its first `limit + 1` bytes if it has more than `limit`.

    A reader can so notice a file that is too large without reading it into memory. Raises `NotARegularFile` for links
    and anything else that is not a file, FileNotFoundError, OSError.
    """
    return read_with_status(path, limit)[0]


def read_with_status(path: Path, limit: int) -> tuple[bytes, os.stat_result]:
    """Return the bytes as `read_regular` does, and the status of that very file, wherever its name leads by now."""
    try:
        # O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotARegularFile(error.errno, "a link or a device, not a file", str(path)) from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotARegularFile(errno.EINVAL, "not a regular file", str(path))
        chunks = []
        left = limit + 1
        while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks), status
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes, temp_folder: Path, mode: int = 0o600) -> None:
    """Write `data` to `path`, so that `path` holds either `data` or what it held before whenever the process dies.

    Creates `path` with `mode`, or replaces it; call `sync_folder` to make that durable. `temp_folder` is in the same
    file system. Raises OSError, and leaves no temp file then.
    """
    temp = temp_folder / f"{secrets.token_hex(16)}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if mode != 0o600:
            os.fchmod(fd, mode)  # whatever the umask says
        with contextlib.suppress(OSError):  # a file system without locks: sweeping goes by age alone
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(fd, data)
        os.fsync(fd)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: `os.write` may take fewer than it is given. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable across a power cut, where the file system can. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_folders_above(path: Path, mode: int = 0o700) -> None:
    """Make the parent folders of `path`, with `mode` less the umask, and make them durable. Raises OSError.

    Each folder is synced before anything is made in it. So of the folders that existed before, only the deepest may be
    one whose maker was killed before it synced; names above it are safe.
    """
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), path.parents))
    sync_if_ours(path.parents[len(missing)].parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)
        sync_if_ours(folder.parent)


def sync_if_ours(folder: Path) -> None:
    """Sync a folder as `sync_folder` does, or do nothing if this user may not open it. Raises OSError."""
    with contextlib.suppress(PermissionError):
        sync_folder(folder)


def scan_folder(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of `folder` in no order; nothing if there is no such folder."""
    try:
        with os.scandir(folder) as found:
            yield from found
    except (FileNotFoundError, NotADirectoryError):
        return


def unlink_if_exists(path: Path) -> bool:
    """Remove the name, and return False if there is none because another process was faster. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def is_being_written(path: Path) -> bool:
    """Return whether the writer of a temp file is alive. See Note [temp files are locked while they are written]."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
