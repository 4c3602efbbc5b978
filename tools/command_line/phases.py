"""The phases of a start, on stderr while they run: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from piecegraph.progress import Phase
from piecegraph.tools.command_line.interrupts import raise_if_interrupted

if TYPE_CHECKING:
    from rich.progress import Progress


def describe(phase: Phase) -> str:
    """Return a phase as text, as in `"compile 2 of 3 (piece 7)"` or `"load 1.24 s (0.5 GiB)"`."""
    words = [phase.name.replace("_", " ")]
    if phase.seconds is not None:
        words.append(f"{phase.seconds:.2f} s")
    elif phase.total:
        words.append(f"{phase.done} of {phase.total}")
    if phase.detail:
        words.append(f"({phase.detail})")
    return " ".join(words)


class PhaseDisplay:
    """A context manager that shows each `Phase` it is called with and remembers the seconds of those that ended.

    `stop` ends the display early, before the answer is written to the same terminal. The first line is printed before
    any slow import. A call after a Ctrl-C that was lost raises KeyboardInterrupt.
    """

    def __init__(self, *, quiet: bool, stream: TextIO | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._progress: Progress | None = None
        self._last = ""

    def __call__(self, phase: Phase) -> None:
        raise_if_interrupted()
        if phase.seconds is not None:
            self.seconds[phase.name] = self.seconds.get(phase.name, 0.0) + phase.seconds
        if self._quiet:
            return
        line = describe(phase)
        if line == self._last:
            return
        self._last = line
        if self._progress is None:
            print(line, file=self._stream, flush=True)
        elif phase.seconds is not None:
            self._progress.console.print(line, highlight=False, markup=False)
            self._progress.reset(self._progress.task_ids[0], description="")
        else:
            self._progress.update(self._progress.task_ids[0], description=line)

    def spin(self) -> None:
        """Show the running phase with a spinner from now on, if the stream is a terminal."""
        if self._quiet or not self._stream.isatty():
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._progress.add_task(self._last)
        self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> PhaseDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Stopwatch:
    """A clock of the seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started
