"""Child processes that start before torch is imported here, so that their imports overlap with the parent's.

On a GPU most models have no piece for Inductor to compile (`needs_no_codegen`): one process waits for a model that
does, and others start when there is work for them.

A compile process takes three times as long to be ready as the import of torch, which may be longer than the trace of a
model. Whether anything will be compiled is not known at that time: a thread makes a guess.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.compiler.workers.kernel_processes import KernelProcesses
    from piecegraph.compiler.workers.process import CompileProcess


class EarlyProcesses:
    """Processes that a thread starts if `are_wanted()` says that they will be used.

    Processes that nobody took end with the block that started them (`started_early`).
    """

    def __init__(self, workers: int | None, are_wanted: Callable[[], bool], has_kernels: bool = False) -> None:
        """Start the thread.

        `workers` is the argument of `num_workers`; with `has_kernels`, processes for our kernels start too if there is
        a GPU.
        """
        self._workers = workers
        self._has_kernels = has_kernels
        self._kernels: KernelProcesses | None = None
        self._are_wanted = are_wanted
        self._processes: list[CompileProcess] = []
        self._folders: tuple[Path, Path] | None = None
        self._thread = threading.Thread(target=self._start, name="piecegraph early processes", daemon=True)
        self._thread.start()

    def folders(self) -> tuple[Path, Path] | None:
        """Return the folders of the processes' caches of Inductor and Triton; None if there are no processes."""
        self._thread.join()
        return self._folders if self._processes else None

    def kernels(self) -> KernelProcesses | None:
        """Return the processes that compile kernels, which live until the block ends; None if there are none."""
        self._thread.join()
        return self._kernels

    def end(self) -> None:
        """End the processes that compile kernels, and those that nobody took."""
        for process in self.take():
            process.end()
        if self._kernels is not None:
            self._kernels.close()

    def take(self) -> list[CompileProcess]:
        """Return all compile processes, which the caller must end; later calls return none."""
        self._thread.join()
        taken, self._processes = self._processes, []
        return taken

    def _start(self) -> None:
        with contextlib.suppress(Exception):  # a compile starts processes too, and reports the error
            if not self._are_wanted():
                return
            from piecegraph.compiler.common.private_folder import private_folder
            from piecegraph.compiler.workers.kernel_processes import KernelProcesses, num_processes
            from piecegraph.compiler.workers.process import CompileProcess, num_at_once, num_workers

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
    """Start processes for the compiles of this thread inside this block, if `are_wanted()` returns True.

    Another thread calls `are_wanted`. `workers` is `CompileConfig.compile_workers`; `has_kernels` says that our kernels
    will be compiled if there is a GPU.
    """
    early = EarlyProcesses(workers, are_wanted, has_kernels)
    token = _early.set(early)
    try:
        yield
    finally:
        _early.reset(token)
        early.end()


def early_processes() -> EarlyProcesses | None:
    """Return the processes of the enclosing `started_early` block; None outside such a block."""
    return _early.get()
