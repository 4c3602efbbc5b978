"""Processes that compile kernels of ours: most of what Triton does for one is Python, one thread of which runs at a
time.

They start before torch is imported here, beside those that compile pieces (`early_processes.py`). Each takes a kernel
at a time, as data: what cannot be said as data, and what fails there, is compiled by who asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from piecegraph.compiler.inductor_caches import child_environment
from piecegraph.compiler.kernel_child import DRIVER
from piecegraph.compiler.private_folder import private_folder
from piecegraph.compiler.stored.kernel_pack import KernelFiles

logger = logging.getLogger(__name__)

MOST = 16
"""Processes: a cold start of Qwen3-0.6B compiles 58 kernels, of 0.1 to 2.7 seconds."""

CORES_LEFT = 2
"""For what starts, and for compiling pieces."""

GPU = Path("/dev/nvidiactl")
"""There where an NVIDIA driver is: known without torch."""


def num_processes(workers: int | None) -> int:
    """How many a start has, of `CompileConfig.compile_workers` at most: none where there is no GPU, no Triton, or
    hardly a core to spare."""
    if not GPU.exists() or find_spec("triton") is None:
        return 0
    most = MOST if workers is None else min(MOST, workers)
    return min(most, max(len(os.sched_getaffinity(0)) - CORES_LEFT, 0))


class KernelProcesses:
    """Owns the processes. Threads may ask at once; who finds all at work waits for one."""

    def __init__(self, number: int) -> None:
        self._folder = private_folder("compiled-kernels")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`; a pipe nobody reads would fill
        self._pid = os.getpid()
        self._all: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = number
        self._driver: Mapping[str, bytes] = {}
        self._asks_for_driver = threading.Thread(target=self._ask_for_driver, name="piecegraph driver", daemon=True)
        try:
            for _ in range(number):
                self._all.append(self._start())
            for process in self._all:
                self._idle.put(process)
            self._asks_for_driver.start()
        except BaseException:
            self.close()
            raise

    def driver(self) -> Mapping[str, bytes]:
        """The module of Triton's driver, as `triton_compat.KernelFolder.libraries`, once it is made; nothing where it
        could not be."""
        self._asks_for_driver.join()
        return self._driver

    def compile(self, said: Mapping[str, Any]) -> KernelFiles | None:
        """A kernel, and modules of launchers that were made for it. `said`: of `triton_compat.said_of`. None: it was
        not compiled, for a reason that is logged, or that who compiles it instead will find."""
        if os.getpid() != self._pid:  # forked: the pipes are those of the process it was forked from
            return None
        with self._lock:
            if self._num_alive == 0:
                return None
        process = self._idle.get()
        if process is None:  # all are dead, or ended
            self._idle.put(None)
            return None
        answer = ""
        try:
            answer = self._ask(process, json.dumps(said) + "\n")
        finally:
            if answer.endswith("\n"):
                self._idle.put(process)
            else:  # it died, maybe in the middle of a line; or who asks is interrupted, and its answer still to come
                process.kill()
                self._lose_one()
        if not answer.endswith("\n"):
            return None
        found = json.loads(answer)
        if "error" in found:
            logger.warning("%s was not compiled in a process of its own: %s", said["name"], found["error"])
            return None
        assert found["fingerprint"] == said["fingerprint"], "one process answers one question at a time"
        return KernelFiles({said["fingerprint"]: _read(found["files"])}, _read(found["libraries"]))

    def close(self) -> None:
        """End them, also those at work: who waits for one compiles by itself. Harmless to repeat."""
        with self._lock:
            self._num_alive = 0
        self._idle.put(None)
        for process in self._all:
            if process.poll() is None:
                process.kill()
        for process in self._all:  # what they had is freed by all at once
            process.wait()
        if self._asks_for_driver.ident is not None:
            self._asks_for_driver.join()  # it reads from one
        for process in self._all:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was written and not read
                    if pipe is not None:
                        pipe.close()
        if not self._log.closed:
            self._log.close()

    def _ask_for_driver(self) -> None:
        with contextlib.suppress(OSError):  # its folder is gone: so are they
            made = self.compile(DRIVER)
            if made is not None:
                self._driver = made.libraries

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "piecegraph.compiler.kernel_child", str(self._folder)],
            env=child_environment(self._folder, self._folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _ask(self, process: subprocess.Popen[str], line: str) -> str:
        """Its answer; empty if it died."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline()
        except (OSError, ValueError):
            return ""

    def _lose_one(self) -> None:
        with self._lock:
            if self._num_alive == 0:
                return
            logger.warning("a process that compiles kernels ended; the others, or this one, compile them")
            self._num_alive -= 1
            if self._num_alive == 0:
                self._idle.put(None)


def _read(paths: Mapping[str, str]) -> dict[str, bytes]:
    return {name: Path(path).read_bytes() for name, path in paths.items()}
