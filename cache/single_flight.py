"""One process compiles a key, the others wait for it. A courtesy: whoever gets no lock compiles too, and is right."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.files import entries_of
from piecegraph.cache.layout import Layout


@dataclass(frozen=True, slots=True)
class Flight:
    """How the wait ended. After a wait, load again: the other has probably saved."""

    held: bool  # False: nobody is kept from compiling the same meanwhile
    waited_s: float  # 0.0 where the lock was free
    reason: str = ""  # why it is not held


@contextmanager
def single_flight(
    layout: Layout,
    key: str,
    *,
    timeout_s: float = 600.0,
    poll_s: float = 0.05,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Flight]:
    """Hold the lock of `key` while the body compiles, or say why it is not held. Raises nothing of its own.

    `Store.prepare` makes the folders of a cache that is still to come; without them no lock is held.

    It is a kernel lock on an open file: it ends with the process that holds it, however that ends. A child that was
    forked (not one that was exec'ed) holds it as well; the timeout bounds what that costs.
    """
    fd, flight = _acquire(layout.lock(key), timeout_s, poll_s, clock, sleep)
    try:
        yield flight
    finally:
        if fd is not None:
            _release(fd, layout.lock(key))


def _acquire(
    path: Path, timeout_s: float, poll_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> tuple[int | None, Flight]:
    begin = clock()
    waited = False
    while True:
        try:
            fd = _try(path)
        except OSError as error:  # read-only, full, no such folder, a file system without locks
            return None, Flight(False, clock() - begin if waited else 0.0, str(error))
        if fd is not None:
            return fd, Flight(True, clock() - begin if waited else 0.0)
        if clock() - begin >= timeout_s:
            return None, Flight(False, clock() - begin, f"another process has compiled it for {timeout_s:g} s")
        waited = True
        sleep(poll_s)


def _try(path: Path) -> int | None:
    """The locked file; None while another holds it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still_there(fd, path):
            return fd
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
            os.close(fd)
            raise
    os.close(fd)
    return None


def _release(fd: int, path: Path) -> None:
    """The file goes first: who opened it before finds, once it has the lock, that it is not there any more."""
    with contextlib.suppress(OSError):  # of a folder that may only be read by now
        if _is_still_there(fd, path):
            os.unlink(path)
    with contextlib.suppress(OSError):  # of a failing disk; the lock is free all the same
        os.close(fd)


def sweep_locks(layout: Layout) -> int:
    """Remove the files of locks that nobody holds, which killed processes left. How many."""
    swept = 0
    for item in entries_of(layout.locks):
        with contextlib.suppress(OSError):
            fd = _try(Path(item.path))
            if fd is not None:
                _release(fd, Path(item.path))
                swept += 1
    return swept


def _is_still_there(fd: int, path: Path) -> bool:
    """The name still leads to the file we locked; somebody may have cleared the folder between."""
    with contextlib.suppress(FileNotFoundError):
        mine, there = os.fstat(fd), os.stat(path, follow_symlinks=False)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False
