"""What every program does that `start_child` starts: its channel, its lifeline, its logs, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from piecegraph.errors import PiecegraphError, WorkerError

logger = logging.getLogger(__name__)


class RanksLostEachOther(WorkerError):
    """No rank of this engine is known to have failed, so that the cause may lie in another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a process ends, in its own words."""

    error: str  # the last line of the traceback
    trace: str
    is_consequence: bool  # whether another rank's end or silence is the cause
    refusal: PiecegraphError | None = None  # what was refused, and not an error of the program


def run_child(role: str, serve: Callable[[Connection, int], None]) -> NoReturn:
    """Call `serve` with the channel and this process's number, then end the process.

    The arguments of the program are two file descriptors, the channel and the lifeline, and the number. The lifeline
    has no content: it ends when the process that started this one ends, however that happens, and then this process
    ends too. An exception is sent to the other end of the channel, and the exit code is 1.
    """
    channel, lifeline, number = Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one gets it too, and ends this one
    threading.Thread(target=_end_with, args=(lifeline,), name="piecegraph lifeline", daemon=True).start()
    code = serve_channel(role, number, channel, serve)
    os._exit(code)  # nothing here needs the interpreter's own end, which takes a second


def serve_channel(role: str, number: int, channel: Connection, serve: Callable[[Connection, int], None]) -> int:
    """Do what `run_child` does over a channel that exists, but for the end; return the exit code."""
    logging.basicConfig(format=f"[{role} {number}] %(levelname)s %(name)s: %(message)s")
    code = 0
    try:
        serve(channel, number)
    except EOFError:  # the other end has ended
        pass
    except BaseException as error:
        code = 1
        failure = failure_of(error)
        if not failure.is_consequence:
            logger.error("this process ends", exc_info=error)
        with contextlib.suppress(OSError):
            channel.send(("failed", failure))
    sys.stderr.flush()
    return code


def failure_of(error: BaseException) -> Failure:
    """Return what the other end is told about an error."""
    from piecegraph.passes.ops.collectives import CollectiveError

    lines = traceback.format_exception(error)
    last = next((line.strip() for line in reversed("".join(lines).splitlines()) if line.strip()), repr(error))
    return Failure(
        error=last,
        trace="".join(lines),
        is_consequence=isinstance(error, (CollectiveError, RanksLostEachOther)),
        refusal=error if isinstance(error, PiecegraphError) else None,
    )


def _end_with(lifeline: int) -> None:
    """End this process when nothing holds the other end of `lifeline` any more."""
    os.read(lifeline, 1)
    os._exit(0)
