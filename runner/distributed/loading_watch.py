"""Ends a load, or a call, in the main thread as soon as another rank ends, whatever it does at that moment."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from piecegraph.runner.distributed.child_process import Child

SIGNAL = signal.SIGURG
"""The signal that a watch sends to its own process; without a handler it has no effect."""

AGAIN_S = 0.05
"""How long after a signal the watch sends the next one, if the load has not ended."""

LOOK_S = 0.5
"""How often the watch looks whether a rank has been stopped."""

_IMPORTS = frozenset({"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"})


class RankLost(BaseException):
    """Another rank has ended or failed. It is no `Exception`, so that no part of a load handles it."""


@contextlib.contextmanager
def ended_by_loss(
    ranks: Sequence[Child],
    on_loss: Callable[[Callable[[], bool]], None],
    stopped_s: float = math.inf,
    *,
    may_answer: bool = False,
) -> Iterator[threading.Event]:
    """Raise `RankLost` from the block, at whatever point it is, once one of `ranks` ends or sends a message.

    The same happens once a rank of this machine has been stopped (by SIGSTOP, for one) for `stopped_s` seconds.
    `may_answer`: ranks may send messages without being lost.

    `on_loss` is called then, in a thread of its own, to end waits of a GPU; its argument returns whether the block has
    ended. The exception comes from the handler of a signal, as that of Ctrl-C does, so
    a wait of any length ends. An import is never interrupted, since half a module cannot be imported again; the
    exception comes behind it. Python runs handlers in the main thread only: in others, and where the program has a
    handler for the same signal, nothing is raised, and the load has to look at the ranks itself.

    Yields what says that the block has ended. Whoever sets it inside the block gets no exception from then on.
    """
    is_free = signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not is_free:
        yield ended
        return
    is_raised = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_raised
        if ended.is_set() or is_raised or _is_importing(frame):
            return
        is_raised = True
        raise RankLost

    stop_reader, stop_writer = os.pipe()
    thread = threading.Thread(
        target=_watch,
        args=(ranks, stop_reader, ended, threading.get_ident(), on_loss, stopped_s, may_answer),
        name="piecegraph watch of ranks",
        daemon=True,
    )
    before = signal.signal(SIGNAL, handle)
    try:
        thread.start()
        yield ended
    finally:
        ended.set()  # from here on the handler raises nothing
        os.close(stop_writer)
        thread.join()
        os.close(stop_reader)
        signal.signal(SIGNAL, before)


def _watch(
    ranks: Sequence[Child],
    stop: int,
    ended: threading.Event,
    main: int,
    on_loss: Callable[[Callable[[], bool]], None],
    stopped_s: float,
    may_answer: bool,
) -> None:
    """Wait until a rank is lost, then send signals to the main thread until the load has ended."""
    stopped_since: dict[int, float] = {}
    with contextlib.ExitStack() as opened:
        sentinels: list[int] = []
        for each in ranks:
            if not may_answer:
                sentinels.append(each.channel.fileno())
            if isinstance(each.process, subprocess.Popen):  # else it is on another machine; its channel ends with it
                with contextlib.suppress(OSError):
                    sentinels.append(os.pidfd_open(each.process.pid))
                    opened.callback(os.close, sentinels[-1])
        while not (found := wait([stop, *sentinels], LOOK_S)):
            now = time.monotonic()
            stopped = [each.process.pid for each in ranks if is_stopped(each)]
            stopped_since = {pid: stopped_since.get(pid, now) for pid in stopped}
            if any(now - since >= stopped_s for since in stopped_since.values()):
                break
            if may_answer and any(each.process.poll() is not None for each in ranks):  # on another machine
                break
        if stop in found:
            return
    if not ended.is_set():
        threading.Thread(target=on_loss, args=(ended.is_set,), name="piecegraph loss of a rank", daemon=True).start()
    while not ended.is_set():
        signal.pthread_kill(main, SIGNAL)
        ended.wait(AGAIN_S)


def is_stopped(rank: Child) -> bool:
    """Return whether a signal has stopped a process of this machine; one that only waits for a processor is not."""
    if not isinstance(rank.process, subprocess.Popen):
        return False
    try:
        state = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported by this frame or by one that has called it."""
    while frame is not None:
        if frame.f_code.co_filename in _IMPORTS:
            return True
        frame = frame.f_back
    return False
