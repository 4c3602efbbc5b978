"""Processes that compile pieces: a piece goes in as a file, its artifact comes out as one."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from piecegraph.compiler import torch_compat
from piecegraph.compiler.errors_of_pieces import piece_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One piece to compile. `weight` orders jobs: heavy ones first."""

    index: int
    graph: Path  # written by piece_format.dump_piece
    artifact: Path  # to be written
    weight: int
    options: Mapping[str, Any]  # torch._inductor.config fields
    settings: Mapping[str, Any]  # torch_compat.process_settings()

    def line(self) -> str:
        """The job as the child reads it."""
        values = {
            "graph": str(self.graph),
            "artifact": str(self.artifact),
            "options": dict(self.options),
            "settings": dict(self.settings),
        }
        return json.dumps(values) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """A job done."""

    job: CompileJob
    seconds: float
    kernels: int


class CompilePool:
    """Owns up to `workers` child processes, each compiling one job at a time.

    All but one start (and import torch) at once, while the model is traced on the core left for it;
    the last starts with the jobs, if there are jobs for it.
    """

    def __init__(self, workers: int, inductor_cache_dir: Path) -> None:
        inductor_cache_dir.mkdir(parents=True, exist_ok=True)
        self._environment = torch_compat.child_environment(inductor_cache_dir)
        self._workers = workers
        self._children = [self._start_child() for _ in range(max(workers - 1, 1))]
        self._jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CompileResult | Exception] = queue.SimpleQueue()
        self._expected = 0

    def submit(self, jobs: Sequence[CompileJob]) -> None:
        """Queue jobs, heaviest first."""
        for job in sorted(jobs, key=lambda job: -job.weight):
            self._jobs.put(job)
        self._expected += len(jobs)
        while len(self._children) < min(self._workers, len(jobs)):
            self._children.append(self._start_child())
        for child in self._children:
            threading.Thread(target=self._feed, args=(child,), daemon=True).start()

    def _start_child(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "piecegraph.compiler.compile_child"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def results(self) -> Iterator[CompileResult]:
        """Jobs as they finish. Raises `PieceCompileFailed` for the first that fails."""
        while self._expected:
            result = self._results.get()
            self._expected -= 1
            if isinstance(result, Exception):
                raise result
            yield result

    def close(self) -> None:
        """End the children, also those still compiling."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    _close(stream)
        self._children = []

    def _feed(self, child: subprocess.Popen[str]) -> None:
        """Give one child jobs until none is left."""
        assert child.stdin is not None and child.stdout is not None
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            try:
                child.stdin.write(job.line())
                child.stdin.flush()
                answer = child.stdout.readline()
            except (OSError, ValueError):
                answer = ""
            self._results.put(_result(job, answer, child))
            if not answer:
                return


def _close(stream: IO[str]) -> None:
    with suppress(BrokenPipeError):  # a job line written to a child that was dead already is still in the buffer
        stream.close()


def _result(job: CompileJob, answer: str, child: subprocess.Popen[str]) -> CompileResult | Exception:
    if not answer:
        code = child.wait()
        stderr = child.stderr.read() if child.stderr is not None and not child.stderr.closed else ""
        tail = " ".join(stderr.strip().splitlines()[-3:])
        return piece_failed(
            job.index, job.weight, f"the compile process ended with status {code}: {tail or 'no output'}"
        )
    values = json.loads(answer)
    if "error" in values:
        return piece_failed(job.index, job.weight, values["error"])
    return CompileResult(job=job, seconds=values["seconds"], kernels=values["kernels"])
