"""A layer's prepared launch in a model with several groups of layers: it is given the metadata of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from piecegraph.compiler.graphs.prepared_ops import Launch, MovablePatch, Patch, PatchableLaunch
from piecegraph.runner.attention.metadata import AttentionMetadata


def launch_of_group(launch: Launch, group: int) -> Launch:
    """`launch`, over its group's part of the metadata. It can be part of a graph if `launch` can."""
    if isinstance(launch, PatchableLaunch):
        return _PatchableGroupLaunch(launch, group)
    return lambda groups: launch(groups[group])


class _PatchableGroupLaunch:
    def __init__(self, launch: PatchableLaunch, group: int) -> None:
        self._launch = launch
        self._group = group

    def __call__(self, groups: tuple[AttentionMetadata, ...]) -> None:
        self._launch(groups[self._group])

    def unpatchable_reason(self) -> str | None:
        return self._launch.unpatchable_reason()

    def record(self, groups: tuple[AttentionMetadata, ...]) -> Patch:
        return patch_of_group(self._launch.record(groups[self._group]), self._group)


def patch_of_group(patch: Patch, group: int) -> Patch:
    """`patch`, over its group's part of the metadata. It can be moved if `patch` can."""
    if isinstance(patch, MovablePatch):
        return _MovableGroupPatch(patch, group)
    return lambda graph_exec, groups: patch(graph_exec, groups[group])


class _MovableGroupPatch:
    def __init__(self, patch: MovablePatch, group: int) -> None:
        self._patch = patch
        self._group = group

    def __call__(self, graph_exec: int, groups: tuple[AttentionMetadata, ...]) -> None:
        self._patch(graph_exec, groups[self._group])

    def moved(self, nodes: Mapping[int, int], move: Callable[[int], int]) -> Patch:
        return patch_of_group(self._patch.moved(nodes, move), self._group)
