"""Ranks that are real processes, load nothing and do nothing: what is left is how their ends are noticed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection

from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.distributed.child_process import Child
from piecegraph.runner.distributed.executor import MpExecutor

DEADLINE_S = 120.0
"""A time in which every process gets a turn, also where many share few cores."""


def sleeping_child(role: str, number: int) -> Child:
    """Return a process that ends by a signal only. Its end of the channel ends with it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["sleep", "600"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    return Child(role, number, process, Connection(ours.detach()))


class SleepingRanks(MpExecutor):
    """An executor of such ranks."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(EngineConfig(source=ModelSource(model="a/b"), tensor_parallel_size=num_ranks))

    def _start_ranks(self, lifeline: int) -> list[Child]:
        return [sleeping_child("rank", rank) for rank in range(1, self._num_ranks)]


def kill(pid: int) -> None:
    """Kill a child of this process, and wait for its end without reading its exit code."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, f"process {pid} was killed and does not end"
        time.sleep(0.01)
