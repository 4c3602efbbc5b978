"""Single flight: one process compiles a key while others wait for it.

Locks only save work: a process that gets no lock compiles too, and its result is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from piecegraph.cache.disk.files import read_regular, scan_folder
from piecegraph.cache.disk.layout import Layout

logger = logging.getLogger(__name__)

OnWait = Callable[[str], None]
"""A function that is called once for each wait longer than `Patience.named_after_s`, with the holder of the lock."""


@dataclass(frozen=True, slots=True)
class Flight:
    """The outcome of a wait. After a wait, load again: the other process has probably saved."""

    held: bool  # False: nobody is kept from compiling the same meanwhile
    waited_s: float  # 0.0 where the lock was free
    reason: str = ""  # why it is not held


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time to wait for another process, in seconds."""

    timeout_s: float = 600.0  # at most, for one that gives signs of life
    silent_s: float = 60.0  # for one that gives none: it was stopped, or its machine is gone
    named_after_s: float = 2.0
    beat_s: float = 1.0  # between signs of life of our own
    poll_s: float = 0.05
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def _log_warning(text: str) -> None:
    logger.warning("%s", text)


class Flights:
    """The locks of keys that this process compiles. Methods raise nothing: without a lock, a process compiles too.

    Each is a kernel lock on an open file, and ends with the process that holds it, however that ends. A child that was
    forked (not one that was exec'ed) holds it as well; `Patience` bounds what that costs. The file names the process,
    and its modification time is a heartbeat, written by a thread while any lock is held: a process that is stopped
    holds its locks and gives no sign of life, and another takes its place.

    Note [who waits holds nothing]: a caller that waits for one key while it holds others could wait for a process that
    waits for one of those. So `wait` releases all locks that are held.
    """

    def __init__(self, layout: Layout, patience: Patience | None = None, on_wait: OnWait | None = None) -> None:
        """Take the layout of a cache. `Store.prepare` makes a new cache's folders; without them no lock is held."""
        self._layout = layout
        self._patience = Patience() if patience is None else patience
        self._on_wait = _log_warning if on_wait is None else on_wait
        self._held: dict[str, int] = {}  # key -> the locked file
        self._not_waited_for: set[str] = set()
        self._heart = _Heartbeat(self._patience.beat_s)

    def take(self, key: str) -> bool:
        """Return whether to compile `key` here, without a wait; False: another process does."""
        if key in self._held or key in self._not_waited_for:
            return True
        try:
            fd = _try_lock(self._layout.lock(key))
        except OSError:  # read-only, full, no such folder, a file system without locks
            return True
        if fd is not None:
            self._hold(key, fd)
        return fd is not None

    def wait(self, key: str) -> Flight:
        """Release all locks, and hold `key` once its holder releases it; the result says if not, and why."""
        self.close()
        fd, flight = _acquire(self._layout.lock(key), self._patience, self._on_wait)
        if fd is not None:
            self._hold(key, fd)
        else:
            self._not_waited_for.add(key)
        return flight

    def release(self, key: str) -> None:
        """Release `key` if it is held."""
        fd = self._held.pop(key, None)
        if fd is not None:
            self._heart.remove(fd)
            _release(fd, self._layout.lock(key))

    def close(self) -> None:
        """Release all locks. Idempotent."""
        for key in list(self._held):
            self.release(key)
        self._heart.stop()

    def _hold(self, key: str, fd: int) -> None:
        _write_holder(fd)
        self._held[key] = fd
        self._heart.add(fd)


@contextmanager
def single_flight(
    layout: Layout, key: str, patience: Patience | None = None, on_wait: OnWait | None = None
) -> Iterator[Flight]:
    """Hold the lock of `key` while the body compiles, or say why it is not held. Raises nothing of its own."""
    flights = Flights(layout, patience, on_wait)
    try:
        yield flights.wait(key)
    finally:
        flights.close()


class _Heartbeat:
    """A thread that touches locked files every `beat_s` seconds while there are any."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._fds: set[int] = set()
        self._lock = threading.Lock()
        self._ends: threading.Event | None = None

    def add(self, fd: int) -> None:
        with self._lock:
            self._fds.add(fd)
            if self._ends is None:
                self._ends = threading.Event()
                threading.Thread(target=self._beat, args=(self._ends,), name="piecegraph locks", daemon=True).start()

    def remove(self, fd: int) -> None:
        """Stop touching `fd`: it may be closed, and its number may become another file's."""
        with self._lock:
            self._fds.discard(fd)

    def stop(self) -> None:
        with self._lock:
            if self._ends is not None:
                self._ends.set()
                self._ends = None

    def _beat(self, ends: threading.Event) -> None:
        while not ends.wait(self._beat_s):
            with self._lock, contextlib.suppress(OSError):
                for fd in self._fds:
                    os.utime(fd)


def _acquire(path: Path, patience: Patience, on_wait: OnWait) -> tuple[int | None, Flight]:
    clock = patience.clock
    begin = seen_at = clock()
    waited = named = False
    seen: tuple[int, int] | None = None
    while True:
        try:
            fd = _try_lock(path)
        except OSError as error:  # read-only, full, no such folder, a file system without locks
            return None, Flight(False, clock() - begin if waited else 0.0, str(error))
        now = clock()
        if fd is not None:
            return fd, Flight(True, now - begin if waited else 0.0)
        if now - begin >= patience.timeout_s:
            return None, Flight(False, now - begin, f"another process has compiled it for {patience.timeout_s:g} s")
        sign = _sign_of_life(path)
        if sign != seen:  # compared with itself: the clock of a file server may be another
            seen, seen_at = sign, now
        elif seen is not None and now - seen_at >= patience.silent_s:
            why = f"{_holder(path)} has given no sign of life for {now - seen_at:.0f} s"
            on_wait(f"{why}: what it compiles is compiled here")
            if not _remove_silent_lock(path, seen):
                return None, Flight(False, now - begin, why)
            continue
        if now - begin >= patience.named_after_s and not named:
            named = True
            on_wait(f"waiting for {_holder(path)}")
        waited = True
        patience.sleep(patience.poll_s)


def _write_holder(fd: int) -> None:
    """Write the holder of the lock into its file. Raises nothing."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)


def _holder(path: Path) -> str:
    """Return the holder that a lock's file names: `"process 1"`, `"process 1 (stopped)"`, `"process 1 on host"`."""
    try:
        pid, host = read_regular(path, 300).decode("ascii").split()
        number = int(pid)
    except (OSError, ValueError):
        return "another process"
    if host != os.uname().nodename:
        return f"process {number} on {host}" if host.isprintable() else f"process {number}"
    with contextlib.suppress(OSError, IndexError):
        if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return f"process {number} (stopped)"
    return f"process {number}"


def _sign_of_life(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a lock's file; None where it is gone."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _remove_silent_lock(path: Path, seen: tuple[int, int]) -> bool:
    """Remove the name of a lock whose holder is silent, so that one of the waiting processes gets a new one.

    The holder of the old lock finds later that its file is gone. Returns False if the name cannot be removed.
    """
    try:
        if _sign_of_life(path) == seen:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _try_lock(path: Path) -> int | None:
    """Return the locked file, or None while another process holds it. Raises OSError."""
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
    """Remove the file, then release its lock.

    A process that opened the file before finds, once it has the lock, that the file is gone.
    """
    with contextlib.suppress(OSError):  # of a folder that may only be read by now
        if _is_still_there(fd, path):
            os.unlink(path)
    with contextlib.suppress(OSError):  # of a failing disk; the lock is free all the same
        os.close(fd)


def sweep_locks(layout: Layout) -> int:
    """Remove the files of locks that nobody holds, left by killed processes, and return how many."""
    swept = 0
    for item in scan_folder(layout.locks):
        with contextlib.suppress(OSError):
            fd = _try_lock(Path(item.path))
            if fd is not None:
                _release(fd, Path(item.path))
                swept += 1
    return swept


def _is_still_there(fd: int, path: Path) -> bool:
    """Return whether the name still leads to the locked file; another process may have cleared the folder."""
    with contextlib.suppress(FileNotFoundError):
        mine, there = os.fstat(fd), os.stat(path, follow_symlinks=False)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False
