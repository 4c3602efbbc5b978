"""A layer's prepared launch in a model with several groups of layers: it is given the metadata of all."""

from __future__ import annotations

from piecegraph.compiler.graphs.prepared_ops import Launch, Patch, PatchableLaunch
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
        group = self._group
        patch = self._launch.record(groups[group])
        return lambda graph_exec, groups: patch(graph_exec, groups[group])
