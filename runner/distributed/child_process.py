"""Processes that this one starts and talks to, such as the other ranks, as seen from here."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from piecegraph import environment
from piecegraph.errors import UsageError
from piecegraph.runner.distributed.child_program import Failure

CAUSE_S = 1.5
"""How long a process has, after something failed, to say why, and to end."""


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that a `Child` uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | str | None:
        """Return the exit code, or a sentence about the end where there is no code; None: it runs."""

    def wait(self, timeout: float | None = None) -> int | str:
        """Wait for the end, and return as `poll`. Raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End the process."""


END_S = 10.0
"""How long a process that was killed may take to end."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process, and the channel to it."""

    role: str  # "rank", or "engine"
    number: int
    process: ChildProcess
    channel: Connection

    @property
    def name(self) -> str:
        """What the process is called in messages."""
        return f"{self.role} {self.number}"


def start_child(
    module: str, role: str, number: int, lifeline: int, timeout_s: float, changes: Mapping[str, str] | None = None
) -> Child:
    """Start a process that runs `module`, which calls `run_child`.

    It has a session of its own, so that an interrupt from the keyboard reaches this process alone. A message that it
    does not take within `timeout_s` raises OSError. It ends when nothing holds the other end of `lifeline` any more.
    `changes`: of its environment.
    """
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(int(timeout_s), 1), 0))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline), str(number)],
            env=environment.child_environment(changes or {}),
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for answers
            pass_fds=(theirs.fileno(), lifeline),
            start_new_session=True,
        )
    return Child(role, number, process, Connection(ours.detach()))


def failure_from(child: Child) -> Failure | int | str | None:
    """Return what a process said, or the exit code of one that ended without a word; None: it runs."""
    with contextlib.suppress(OSError, EOFError):
        while child.channel.poll():
            name, value = child.channel.recv()
            if name == "failed":
                assert isinstance(value, Failure), value
                return value
            if name == "ended":  # so says the machine that it ran on
                assert isinstance(value, int), value
                return value
    return child.process.poll()


def how_it_ended(child: Child, found: Failure | int | str) -> str:
    """Return a sentence with a process's name, exit code and, if it raised, the last line of its traceback."""
    if isinstance(found, int):
        return f"{child.name} (process {child.process.pid}) ended with exit code {found}."
    if isinstance(found, str):
        return f"{child.name} (process {child.process.pid}) ended: {found}."
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(CAUSE_S)
    code = child.process.poll()
    end = f", exit code {code}" if isinstance(code, int) else ""
    return f"{child.name} (process {child.process.pid}{end}) failed: {found.error.rstrip('.')}."


def pickled(value: object, what: str) -> bytes:
    """Return a message. Raises `UsageError`, with `what` as its subject, if it cannot be sent."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"{what} cannot be sent to another process: {error}.") from error


def wait_for(processes: Sequence[Child], timeout_s: float) -> None:
    """Wait until all have ended, at most `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(deadline - time.monotonic(), 0.0))


def end_all(processes: Sequence[Child], lifeline: int) -> None:
    """Kill the processes that still run, and wait for their end."""
    with contextlib.suppress(OSError):
        os.close(lifeline)
    for each in processes:
        if each.process.poll() is None:
            each.process.kill()
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(END_S)
        each.channel.close()
