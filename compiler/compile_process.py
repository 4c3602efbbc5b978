"""A process that compiles pieces, as its parent sees it. Starting one needs no torch here: what it imports, it does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from piecegraph.compiler.inductor_caches import child_arguments, child_environment

MOST_WORKERS = 4
"""Processes started unless the caller says otherwise: a decoder has at most 4 unique pieces (5 with MoE)."""


def num_workers(asked: int | None) -> int:
    """How many there are at most: one a core and `MOST_WORKERS`, where nobody asked for a number."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS) if asked is None else asked


def num_at_once(workers: int) -> int:
    """How many of `workers` start at once: all but one, while the model is traced on the core left for it."""
    return max(workers - 1, 1)


@dataclass(frozen=True, slots=True)
class CompileProcess:
    """Takes a job a line, and answers a line."""

    process: subprocess.Popen[str]
    log: IO[str]  # what it wrote to standard error

    @classmethod
    def start(cls, inductor: Path, triton: Path) -> CompileProcess:
        """`inductor` and `triton`: the folders of their caches."""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `end`; a pipe nobody reads would fill
        process = subprocess.Popen(
            [sys.executable, "-m", "piecegraph.compiler.compile_child", *child_arguments()],
            env=child_environment(inductor, triton),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        return cls(process, log)

    def ask(self, line: str) -> str:
        """Its answer to a job; empty if it died."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(line)
            stdin.flush()
            return stdout.readline()
        except (OSError, ValueError):
            return ""

    def last_words(self) -> str:
        """Of one that died: its status, and the end of what it wrote."""
        code = self.process.wait()
        text = ""
        with suppress(ValueError):  # closed: it is being ended
            self.log.seek(0)
            text = self.log.read()
        tail = " ".join(text.strip().splitlines()[-3:])
        return f"the compile process ended with status {code}: {tail or 'no output'}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a job line for a child that was dead already is in the buffer
                    stream.close()
