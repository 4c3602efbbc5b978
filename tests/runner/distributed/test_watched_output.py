from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.errors import WorkerError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.distributed.group_runner import LeadingRunner
from piecegraph.runner.distributed.watched_output import WatchedOutput


class Output:
    """An output that is there after some looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    @property
    def is_there(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def get(self) -> str:
        return "tokens"


class Runner:
    """A runner whose rank 1 is lost, once that is looked for."""

    def __init__(self) -> None:
        self.executor = self
        self.num_steps = 0

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self.num_steps += 1
        try:
            yield
        except CollectiveError as error:
            raise WorkerError(str(error)) from error

    def check(self) -> None:
        raise WorkerError("rank 1 is lost")


def watched(looks: float, timeout_s: float = 60.0) -> tuple[Any, Runner]:
    runner = Runner()
    return WatchedOutput(Output(looks), runner, timeout_s), runner  # type: ignore[arg-type]


@pytest.mark.parametrize("looks", [0, 3])
def test_an_output_is_read_once_it_is_there(looks: int) -> None:
    output, runner = watched(looks)
    assert output.get() == "tokens"
    assert runner.num_steps == min(looks, 1)


def test_a_lost_rank_ends_the_wait() -> None:
    output, _ = watched(float("inf"))
    with pytest.raises(WorkerError, match="rank 1 is lost"):
        output.get()


@pytest.mark.parametrize("error", [CollectiveError("lost"), KeyboardInterrupt()])
def test_what_ends_the_other_ranks_ends_what_a_gpu_waits_for(error: BaseException) -> None:
    """So that the GPU can be waited for afterwards; an interrupt ends the ranks, too."""
    aborts: list[str] = []
    group = SimpleNamespace(is_on_gpu=True)
    runner: Any = SimpleNamespace(executor=Runner(), group=group, abort=lambda: aborts.append("abort"))
    with LeadingRunner.in_step(runner):
        pass
    assert not aborts
    with pytest.raises((WorkerError, KeyboardInterrupt)), LeadingRunner.in_step(runner):
        raise error
    assert aborts == ["abort"]


def test_a_step_that_does_not_end_ends_the_wait() -> None:
    output, _ = watched(float("inf"), timeout_s=-1.0)
    with pytest.raises(WorkerError, match="the step did not end on the GPU of rank 0"):
        output.get()
