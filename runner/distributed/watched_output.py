"""The output of a step on a GPU, read while the other ranks are watched: a lost rank leaves a GPU waiting for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.output.async_output import AsyncOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from piecegraph.runner.distributed.group_runner import LeadingRunner

LOOK_S = 0.05
"""How long to wait between two looks at the other ranks."""

POLL_S = 0.00005
"""How long to wait between two looks at the copy to the host."""


class WatchedOutput(AsyncOutput):
    """An output that is read only once it is there. `get` raises `WorkerError` if a rank ends or does not answer."""

    def __init__(self, output: Any, runner: LeadingRunner, timeout_s: float) -> None:
        """Watch `output`, which has `get` and `is_there`, of rank 0. `timeout_s`: how long `get` waits at most."""
        self._watched = output
        self._runner = runner
        self._timeout_s = timeout_s

    @property
    def is_there(self) -> bool:
        """Return whether `get` would not wait."""
        return bool(self._watched.is_there)

    def get(self) -> ModelRunnerOutput:
        """Wait until the step has run and its output is copied, and return it. May be called again."""
        if not self._watched.is_there:
            self._wait()
        found: ModelRunnerOutput = self._watched.get()
        return found

    def _wait(self) -> None:
        started = looked = time.monotonic()
        with self._runner.in_step():
            while not self._watched.is_there:
                now = time.monotonic()
                if now - looked > LOOK_S:
                    looked = now
                    self._runner.executor.check()
                if now - started > self._timeout_s:
                    raise CollectiveError("the step did not end on the GPU of rank 0")
                time.sleep(POLL_S)
