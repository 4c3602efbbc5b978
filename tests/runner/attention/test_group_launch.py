"""A launch in a model with several groups of layers takes its own group's metadata, in a graph and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecegraph.compiler.graphs.prepared_ops import PatchableLaunch
from piecegraph.runner.attention.group_launch import launch_of_group


class Recorded:
    """A patchable launch that notes what it is given."""

    def __init__(self, reason: str | None = None) -> None:
        self.seen: list[object] = []
        self.reason = reason

    def __call__(self, metadata: object) -> None:
        self.seen.append(("launch", metadata))

    def unpatchable_reason(self) -> str | None:
        return self.reason

    def record(self, metadata: object) -> Callable[[int, Any], None]:
        self.seen.append(("record", metadata))
        return lambda graph_exec, metadata: self.seen.append((graph_exec, metadata))


def test_a_plain_launch_stays_plain() -> None:
    seen: list[object] = []
    launch = launch_of_group(seen.append, 1)
    assert not isinstance(launch, PatchableLaunch)
    launch(("first", "second"))
    assert seen == ["second"]


def test_a_patchable_one_stays_patchable() -> None:
    inner = Recorded()
    launch = launch_of_group(inner, 1)
    assert isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() is None
    launch(("a", "b"))
    patch = launch.record(("c", "d"))
    patch(7, ("e", "f"))
    assert inner.seen == [("launch", "b"), ("record", "d"), (7, "f")]


def test_why_it_cannot_be_in_a_graph_is_passed_on() -> None:
    launch = launch_of_group(Recorded("no node can become it"), 0)
    assert isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() == "no node can become it"
