"""A pool of child processes that compile pieces: each job names the file of a piece and the file of its artifact."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from piecegraph.compiler.rewriting.post_grad import PostGradOutcome
from piecegraph.compiler.workers.process import CompileProcess, num_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One piece to compile. Jobs with a larger `weight` start first."""

    index: int  # the submitter's number for the job
    graph: Path  # written by piece_format.dump_piece
    artifact: Path  # the file that the child writes
    weight: int
    options: Mapping[str, Any]  # torch._inductor.config fields
    settings: Mapping[str, Any]  # process_settings()
    sizes: Mapping[str, int] | None = None  # symbol -> number, to compile for these sizes only
    post_grad: Mapping[str, Any]  # post_grad.PostGrad.as_data()

    def line(self) -> str:
        """Return the job as the line that the child reads."""
        values = {
            "graph": str(self.graph),
            "artifact": str(self.artifact),
            "options": dict(self.options),
            "settings": dict(self.settings),
            "sizes": dict(self.sizes) if self.sizes is not None else None,
            "post_grad": dict(self.post_grad),
        }
        return json.dumps(values) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """The result of a job that succeeded."""

    job: CompileJob
    seconds: float
    kernels: int
    libraries: Mapping[str, Path]  # C++ kernels that were built, by `library_digest`
    post_grad: tuple[PostGradOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailure:
    """A job that failed. `reason` is the compiler's message, or why only the parent can compile the piece."""

    job: CompileJob
    reason: str
    needs_parent: bool = False  # whether the parent can compile the piece, as only it has a pass


class CompileInterrupted(Exception):
    """The pool was closed by another thread while results were awaited."""


class CompilePool:
    """The owner of up to `workers` child processes, each of which compiles one job at a time.

    Unless children have started already, all but one start (and import torch) at once, which leaves a core for tracing
    the model; the others start with the jobs if there are enough. A child that dies fails its job, and another child
    takes its place. `inductor` and `triton` are the folders of the children's caches. `niceness` is added to that of
    this process.
    """

    def __init__(
        self, workers: int, inductor: Path, triton: Path, started: Sequence[CompileProcess] = (), niceness: int = 0
    ) -> None:
        """Start children, or take over `started`, which were started with the same folders."""
        self._start = partial(CompileProcess.start, inductor, triton, niceness)
        self._workers = workers
        self._children = list(started) or [self._start() for _ in range(num_at_once(workers))]
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CompileResult | CompileFailure | None] = queue.SimpleQueue()  # None: closed
        self._expected = 0

    def submit(self, jobs: Sequence[CompileJob], *, at_once: int | None = None) -> None:
        """Queue jobs, heaviest first. `at_once` limits, besides the number of workers, how many compile in parallel."""
        assert not self._expected, "the results of earlier jobs must be read first"
        for job in sorted(jobs, key=lambda job: -job.weight):
            self._jobs.put(job)
        self._expected += len(jobs)
        feeders = min(self._workers, len(jobs), at_once or self._workers)
        while len(self._children) < feeders:
            self._children.append(self._start())
        for child in self._children[:feeders]:
            threading.Thread(target=self._feed, args=(child,), daemon=True).start()

    def results(self) -> Iterator[CompileResult | CompileFailure]:
        """Yield the result of each job as it finishes or fails. Raises `CompileInterrupted` once the pool is closed."""
        while self._expected:
            result = self._results.get()
            if result is None:
                raise CompileInterrupted
            self._expected -= 1
            yield result

    def close(self) -> None:
        """End all children, busy ones too, and a wait for `results` in another thread. Idempotent."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
        for child in children:
            child.end()
        self._results.put(None)

    def _feed(self, child: CompileProcess) -> None:
        """Give jobs to one child, or to the child that replaces it, until none is left."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            answer = child.ask(job.line())
            result = _result(job, answer) if answer else CompileFailure(job=job, reason=child.exit_message())
            if not answer:
                with self._lock:
                    if self._closed:
                        return
                    dead, child = child, self._start()
                    self._children[self._children.index(dead)] = child
                dead.end()
            self._results.put(result)


def _result(job: CompileJob, answer: str) -> CompileResult | CompileFailure:
    values = json.loads(answer)
    if "error" in values:
        return CompileFailure(job=job, reason=values["error"])
    if "needs_parent" in values:
        return CompileFailure(job=job, reason=values["needs_parent"], needs_parent=True)
    post_grad = tuple(map(PostGradOutcome.from_data, values["post_grad"]))
    libraries = {digest: Path(path) for digest, path in values["libraries"].items()}
    return CompileResult(
        job=job, seconds=values["seconds"], kernels=values["kernels"], libraries=libraries, post_grad=post_grad
    )
