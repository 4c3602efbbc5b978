"""Processes that compile pieces: a piece goes in as a file, its artifact comes out as one."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from piecegraph.compiler.compile_process import CompileProcess, num_at_once
from piecegraph.compiler.post_grad import PostGradOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One piece to compile. `weight` orders jobs: heavy ones first."""

    index: int  # the submitter's own number for it
    graph: Path  # written by piece_format.dump_piece
    artifact: Path  # to be written
    weight: int
    options: Mapping[str, Any]  # torch._inductor.config fields
    settings: Mapping[str, Any]  # process_settings()
    sizes: Mapping[str, int] | None = None  # symbol -> number: compile it for these sizes alone
    post_grad: Mapping[str, Any]  # post_grad.PostGrad.as_data()

    def line(self) -> str:
        """The job as the child reads it."""
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
    """A job done."""

    job: CompileJob
    seconds: float
    kernels: int
    libraries: Mapping[str, Path]  # C++ kernels that were built, by `library_digest`
    post_grad: tuple[PostGradOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailure:
    """A job that failed; `reason` is the compiler's own text, or why only the process that has the pass can."""

    job: CompileJob
    reason: str
    is_only_there: bool = False


class CompilePool:
    """Owns up to `workers` child processes, each compiling one job at a time.

    Unless some have started already, all but one start (and import torch) at once, while the model is traced on the
    core left for it; the others start with the jobs, if there are jobs for them. A child that dies costs the job it
    had: another takes its place. `inductor` and `triton` are the folders of their caches.
    """

    def __init__(self, workers: int, inductor: Path, triton: Path, started: Sequence[CompileProcess] = ()) -> None:
        """`started`: children there are already, over these folders; the pool's from now on."""
        self._start = partial(CompileProcess.start, inductor, triton)
        self._workers = workers
        self._children = list(started) or [self._start() for _ in range(num_at_once(workers))]
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CompileResult | CompileFailure] = queue.SimpleQueue()
        self._expected = 0

    def submit(self, jobs: Sequence[CompileJob], *, at_once: int | None = None) -> None:
        """Queue jobs, heaviest first. `at_once`: how many may compile side by side, beside the number of workers."""
        assert not self._expected, "the results of the jobs before are all read"
        for job in sorted(jobs, key=lambda job: -job.weight):
            self._jobs.put(job)
        self._expected += len(jobs)
        feeders = min(self._workers, len(jobs), at_once or self._workers)
        while len(self._children) < feeders:
            self._children.append(self._start())
        for child in self._children[:feeders]:
            threading.Thread(target=self._feed, args=(child,), daemon=True).start()

    def results(self) -> Iterator[CompileResult | CompileFailure]:
        """Jobs as they finish or fail."""
        while self._expected:
            result = self._results.get()
            self._expected -= 1
            yield result

    def close(self) -> None:
        """End the children, also those still compiling."""
        with self._lock:
            self._closed = True
        for child in self._children:
            child.end()
        self._children = []

    def _feed(self, child: CompileProcess) -> None:
        """Give one child, or whoever takes its place, jobs until none is left."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            answer = child.ask(job.line())
            result = _result(job, answer) if answer else CompileFailure(job=job, reason=child.last_words())
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
    if "only_there" in values:
        return CompileFailure(job=job, reason=values["only_there"], is_only_there=True)
    post_grad = tuple(map(PostGradOutcome.from_data, values["post_grad"]))
    libraries = {digest: Path(path) for digest, path in values["libraries"].items()}
    return CompileResult(
        job=job, seconds=values["seconds"], kernels=values["kernels"], libraries=libraries, post_grad=post_grad
    )
