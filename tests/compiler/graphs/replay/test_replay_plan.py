"""The flat list of steps, and the function generated of it."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import pytest

from piecegraph.compiler.graphs.replay.replay_plan import ReplayPlan, ReplayStep, straight_line


def test_steps_run_in_order_and_functions_of_metadata_are_called_once() -> None:
    """Steps with the same function share its value; it is read before anything runs."""
    seen: list[Any] = []

    def one() -> str:
        seen.append("read one")
        return "one"

    def other() -> str:
        seen.append("read other")
        return "other"

    steps = [
        ReplayStep(lambda: seen.append("graph"), "piece 0", "graph"),
        ReplayStep(seen.append, "a::b", "launch", one),
        ReplayStep(seen.append, "a::c", "launch", other),
        ReplayStep(seen.append, "a::b", "launch", one),
    ]
    run = straight_line(steps, "a bucket")
    for _ in range(2):
        seen.clear()
        run()
        assert seen == ["read one", "read other", "graph", "one", "other", "one"]


def test_a_single_recording_runs_without_a_python_frame() -> None:
    step = ReplayStep(lambda: None, "full step", "graph")
    assert ReplayPlan.of([step], (), "full step").run is step.run
    assert ReplayPlan.of([], (), "nothing").run() is None


def test_tracebacks_find_the_generated_lines() -> None:
    def fails() -> None:
        raise ValueError("inside a replay")

    run = straight_line([ReplayStep(fails, "piece 7", "graph")], "a bucket")
    with pytest.raises(ValueError, match="inside a replay") as caught:
        run()
    frame = traceback.extract_tb(caught.value.__traceback__)[1]
    assert frame.line == "step_0()  # graph: piece 7"
    assert linecache.getline(frame.filename, 1).startswith('"""a bucket: 1 steps.')
