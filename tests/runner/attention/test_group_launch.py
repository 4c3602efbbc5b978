"""A launch in a model with several groups of layers takes its own group's metadata, in a graph and outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piecegraph.compiler.graphs.prepared_ops import MovablePatch, PatchableLaunch
from piecegraph.runner.attention.group_launch import launch_of_group, patch_of_group


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


class Moved:
    """A patch that notes what it is given, and where it was moved to."""

    def __init__(self, seen: list[object], at: object = "here") -> None:
        self.seen, self.at = seen, at

    def __call__(self, graph_exec: int, metadata: Any) -> None:
        self.seen.append((graph_exec, metadata, self.at))

    def moved(self, nodes: Mapping[int, int], move: Callable[[int], int]) -> Moved:
        return Moved(self.seen, (nodes[1], move(8)))


def test_a_patch_that_can_be_moved_still_can() -> None:
    seen: list[object] = []
    patch = patch_of_group(Moved(seen), 1)
    assert isinstance(patch, MovablePatch)
    there = patch.moved({1: 2}, lambda address: address + 1)
    patch(7, ("a", "b"))
    there(7, ("c", "d"))
    assert seen == [(7, "b", "here"), (7, "d", (2, 9))]
    assert isinstance(there, MovablePatch) and not isinstance(patch_of_group(lambda *args: None, 1), MovablePatch)


def test_why_it_cannot_be_in_a_graph_is_passed_on() -> None:
    launch = launch_of_group(Recorded("no node can become it"), 0)
    assert isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() == "no node can become it"
