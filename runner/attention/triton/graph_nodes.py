"""A layer's kernels as nodes of a captured graph, which are patched for each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piecegraph.compiler.common.cuda_driver import set_enabled
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.triton.kernels.launch import Grid, PreparedKernel
from piecegraph.runner.attention.triton.metadata import TritonMetadata


class Launch(NamedTuple):
    """One kernel of a batch."""

    kernel: PreparedKernel
    grid: Grid
    changed: tuple[int, ...]  # the arguments that differ from batch to batch


@dataclass(slots=True)
class Node:
    """A kernel node of a captured graph."""

    handle: int
    is_enabled: bool | None = True  # None: unknown, because the call that changes it was interrupted

    def become(self, graph_exec: int, launch: Launch | None) -> None:
        """Have the node run `launch` from the next replay on, or nothing."""
        if launch is not None:
            launch.kernel.patch(graph_exec, self.handle, launch.grid, *launch.changed)
        if self.is_enabled != (launch is not None):
            self.is_enabled = None
            set_enabled(graph_exec, self.handle, launch is not None)
            self.is_enabled = launch is not None


Launches = tuple[Launch | None, Launch | None, Launch | None]
"""The launches of one batch in order: K/V write, prefill and decode; None where no request takes the kernel."""


class AttentionNodes:
    """A layer's kernels in a graph, changed before a replay (`prepared_ops.Patch`)."""

    def __init__(
        self, launches: Callable[[TritonMetadata], Launches], mixed: Sequence[Node], decode: Node | None
    ) -> None:
        """Take over nodes. `launches` returns the launches of a batch; `mixed` are the nodes of the three kernels.

        `decode`: the node for batches of decode requests only, for which the three are disabled; None: there is none.
        """
        self._launches = launches
        self._mixed = tuple(mixed)
        self._decode = decode
        self._patched_for: tuple[int, ...] | None = None

    def __call__(self, graph_exec: int, metadata: AttentionMetadata) -> None:
        """Have the graph launch the kernels of this batch; next to free where they equal those of the last batch."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if metadata.launch_key == self._patched_for:
            return
        self._patched_for = None  # until all nodes are patched
        kv_write, prefill, decode = self._launches(metadata)
        if self._decode is not None:
            is_all = kv_write is None
            self._decode.become(graph_exec, decode if is_all else None)
            decode = None if is_all else decode
        for node, launch in zip(self._mixed, (kv_write, prefill, decode), strict=True):
            node.become(graph_exec, launch)
        self._patched_for = metadata.launch_key
