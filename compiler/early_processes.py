"""Processes that compile pieces, and kernels, and start before torch is imported here: what they import, they import
beside it.

With a GPU most models have no piece for Inductor to compile (`as_it_is.py`): one process waits for those that do, and
others start when there is work for them.

Such a process takes three times as long to be ready as importing torch does, which may be longer than a model takes to
trace. Whether anything will be compiled is not known then: it is a guess, made by a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.compiler.compile_process import CompileProcess
    from piecegraph.compiler.kernel_processes import KernelProcesses


class EarlyProcesses:
    """Started by a thread, if it finds that they will be wanted; those that nobody took end with the block that
    started them (`started_early`)."""

    def __init__(self, workers: int | None, are_wanted: Callable[[], bool], has_kernels: bool = False) -> None:
        """`workers`: as `compile_process.num_workers` takes it. `has_kernels`: what starts has kernels of ours, if
        there is a GPU."""
        self._workers = workers
        self._has_kernels = has_kernels
        self._kernels: KernelProcesses | None = None
        self._are_wanted = are_wanted
        self._processes: list[CompileProcess] = []
        self._folders: tuple[Path, Path] | None = None
        self._thread = threading.Thread(target=self._start, name="piecegraph early processes", daemon=True)
        self._thread.start()

    def folders(self) -> tuple[Path, Path] | None:
        """Where they keep what Inductor and Triton do, for who takes them; None: there are none."""
        self._thread.join()
        return self._folders if self._processes else None

    def kernels(self) -> KernelProcesses | None:
        """Those that compile kernels, until the block ends; None: there are none."""
        self._thread.join()
        return self._kernels

    def end(self) -> None:
        """Those that compile kernels, and those that nobody took."""
        for process in self.take():
            process.end()
        if self._kernels is not None:
            self._kernels.close()

    def take(self) -> list[CompileProcess]:
        """All of them, once: they are the caller's to end."""
        self._thread.join()
        taken, self._processes = self._processes, []
        return taken

    def _start(self) -> None:
        with contextlib.suppress(Exception):  # whoever compiles starts processes too, and says what is wrong
            if not self._are_wanted():
                return
            from piecegraph.compiler.compile_process import CompileProcess, num_at_once, num_workers
            from piecegraph.compiler.kernel_processes import KernelProcesses, num_processes
            from piecegraph.compiler.private_folder import private_folder

            workers = num_workers(self._workers)
            if workers < 2:
                return
            if self._has_kernels and (number := num_processes(self._workers)) > 0:
                self._kernels = KernelProcesses(number)
            self._folders = inductor, triton = private_folder("inductor"), private_folder("triton")
            for _ in range(num_at_once(workers) if self._kernels is None else 1):
                self._processes.append(CompileProcess.start(inductor, triton))


_early: ContextVar[EarlyProcesses | None] = ContextVar("piecegraph_early_processes", default=None)


@contextlib.contextmanager
def started_early(workers: int | None, are_wanted: Callable[[], bool], *, has_kernels: bool = False) -> Iterator[None]:
    """Have processes for what compiles inside this block, in this thread, if `are_wanted()`, which another thread
    asks. `workers`: of `CompileConfig.compile_workers`; `has_kernels`: some of it are kernels of ours, where there is
    a GPU."""
    early = EarlyProcesses(workers, are_wanted, has_kernels)
    token = _early.set(early)
    try:
        yield
    finally:
        _early.reset(token)
        early.end()


def early_processes() -> EarlyProcesses | None:
    """Those of the block around; None: there is none."""
    return _early.get()
