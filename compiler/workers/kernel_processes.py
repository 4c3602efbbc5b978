"""Child processes that compile our kernels.

Most of Triton's work for a kernel is Python code, of which one process runs one thread at a time. The children start
before torch is imported here, beside those that compile pieces (`prestart.py`). A child takes one kernel at a time, as
data; the caller compiles a kernel that cannot be expressed as data, or that fails in a child.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.inductor.caches import child_environment
from piecegraph.compiler.triton.kernel_pack import KernelFiles
from piecegraph.compiler.workers.kernel_child import DRIVER
from piecegraph.compiler.workers.process import ChildProcess

logger = logging.getLogger(__name__)

MOST = 16
"""The largest number of processes. A cold start of Qwen3-0.6B compiles 58 kernels of 0.1 to 2.7 seconds each."""

CORES_LEFT = 2
"""The number of cores left for the parent and for compiling pieces."""

GPU = Path("/dev/nvidiactl")
"""A file that exists where an NVIDIA driver is loaded, which can be checked without torch."""


def num_processes(workers: int | None) -> int:
    """Return the number of processes for a start, at most `workers` (`CompileConfig.compile_workers`).

    It is 0 without a GPU, without Triton, and with no core to spare.
    """
    if not GPU.exists() or find_spec("triton") is None:
        return 0
    most = MOST if workers is None else min(MOST, workers)
    return min(most, max(len(os.sched_getaffinity(0)) - CORES_LEFT, 0))


class KernelProcesses:
    """The owner of the processes. Threads may ask concurrently; a thread waits while all processes are busy."""

    def __init__(self, number: int) -> None:
        self._folder = private_folder("compiled-kernels")
        self._pid = os.getpid()
        self._all: list[ChildProcess] = []
        self._idle: queue.SimpleQueue[ChildProcess | None] = queue.SimpleQueue()
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
        """Return the module of Triton's driver by path, as in `KernelFolder.libraries`; empty if it could not be made.

        Waits until a process has made it.
        """
        self._asks_for_driver.join()
        return self._driver

    def compile(self, spec: Mapping[str, Any]) -> KernelFiles | None:
        """Return the files of the kernel `spec` (`to_kernel_spec`), with new modules of launchers.

        None means that it was not compiled, for a reason that is logged or that the caller will meet when it compiles
        the kernel itself.
        """
        if os.getpid() != self._pid:  # a forked process must not use its parent's pipes
            return None
        with self._lock:
            if self._num_alive == 0:
                return None
        process = self._idle.get()
        if process is None:  # all have died, or were ended
            self._idle.put(None)
            return None
        answer = ""
        try:
            answer = self._ask(process, json.dumps(spec) + "\n")
        finally:
            if answer.endswith("\n"):
                self._idle.put(process)
            else:  # it died, perhaps within a line; or the caller was interrupted before the answer came
                process.kill()
                self._lose_one()
        if not answer.endswith("\n"):
            return None
        found = json.loads(answer)
        if "error" in found:
            logger.warning("%s was not compiled in a child process: %s", spec["name"], found["error"])
            return None
        assert found["fingerprint"] == spec["fingerprint"], "a process answers one job at a time"
        return KernelFiles({spec["fingerprint"]: _read(found["files"])}, _read(found["libraries"]))

    def close(self) -> None:
        """End all processes, busy ones too: waiting callers then compile their kernels themselves. Idempotent."""
        with self._lock:
            self._num_alive = 0
        self._idle.put(None)
        for process in self._all:  # all at once: they free their memory in parallel
            process.kill()
        for process in self._all:
            process.process.wait()
        if self._asks_for_driver.ident is not None:
            self._asks_for_driver.join()  # the thread reads from a process
        for process in self._all:
            process.end()

    def _ask_for_driver(self) -> None:
        with contextlib.suppress(OSError):  # the folder was removed, as at the end of this process
            made = self.compile(DRIVER)
            if made is not None:
                self._driver = made.libraries

    def _start(self) -> ChildProcess:
        module = "piecegraph.compiler.workers.kernel_child"
        return ChildProcess.spawn(module, [str(self._folder)], child_environment(self._folder, self._folder))

    def _ask(self, process: ChildProcess, line: str) -> str:
        return process.ask(line)

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
