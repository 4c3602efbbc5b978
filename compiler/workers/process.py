"""The protocol of child processes that compile: a job per line of JSON in, an answer per line of JSON out.

The parent holds a `ChildProcess`; the child calls `serve`. This file imports no torch, so that children can start
before the parent has imported torch; each child imports what it needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from piecegraph.compiler.inductor.caches import child_arguments, child_environment

MOST_WORKERS = 4
"""The number of processes unless the caller chooses one: a decoder has at most 4 unique pieces (5 with MoE)."""


def num_workers(asked: int | None) -> int:
    """Return the largest number of compile processes: `asked`, or by default one per core up to `MOST_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS) if asked is None else asked


def num_at_once(workers: int) -> int:
    """Return how many of `workers` start at once: all but one, which leaves a core for tracing the model."""
    return max(workers - 1, 1)


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A child process of one of our modules, as its parent sees it."""

    process: subprocess.Popen[str]
    log: IO[str]  # what the child wrote to standard error

    @classmethod
    def spawn(cls, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start `python -m module arguments`. Raises OSError."""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `end`; a pipe that nobody reads would fill up
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except BaseException:
            log.close()
            raise
        return cls(process, log)

    def ask(self, line: str) -> str:
        """Send one job, a line with its newline, and return the line of the answer; "" if the child died."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(line)
            stdin.flush()
            return stdout.readline()
        except (OSError, ValueError):
            return ""

    def exit_message(self) -> str:
        """Return the exit status of a child that died, and the end of its standard error."""
        code = self.process.wait()
        text = ""
        with suppress(ValueError):  # the log is closed while the child is being ended
            self.log.seek(0)
            text = self.log.read()
        tail = " ".join(text.strip().splitlines()[-3:])
        return f"the compile process ended with status {code}: {tail or 'no output'}"

    def kill(self) -> None:
        """Kill the child if it runs, without waiting for its end."""
        if self.process.poll() is None:
            self.process.kill()

    def end(self) -> None:
        """Kill the child, wait for its end, and close its pipes and its log. Idempotent."""
        self.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with suppress(OSError):  # the pipe may hold a job that a dead child never read
                    stream.close()


class CompileProcess(ChildProcess):
    """A child process that compiles pieces (`child.py`)."""

    __slots__ = ()

    @classmethod
    def start(cls, inductor: Path, triton: Path, niceness: int = 0) -> CompileProcess:
        """Start a process whose caches of Inductor and Triton are in these folders.

        `niceness` is added to that of this process.
        """
        module = "piecegraph.compiler.workers.child"
        started = cls.spawn(module, child_arguments(), child_environment(inductor, triton))
        if niceness:
            with suppress(OSError):  # it has ended, and its first job will say why
                os.setpriority(os.PRIO_PROCESS, started.process.pid, os.nice(0) + niceness)
        return started


def claim_standard_output() -> IO[str]:
    """Return standard output for answers, and send what libraries print to standard error from now on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(answers: IO[str], handle: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each job of standard input with `handle(job)`, or with its error, until standard input ends.

    Raises ValueError, which ends the process, for a line that is not JSON.
    """
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = handle(job)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
