"""A layer's kernels as nodes of a captured graph, and what a batch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piecegraph.compiler.graphs.cuda_driver import set_enabled
from piecegraph.runner.attention.kernels.launch import Grid, PreparedKernel
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.triton_metadata import TritonMetadata


class Launch(NamedTuple):
    """One kernel of a batch."""

    kernel: PreparedKernel
    grid: Grid
    changed: tuple[int, ...]


@dataclass(slots=True)
class Node:
    """Of a captured graph: its handle, and whether it is enabled."""

    handle: int
    is_enabled: bool = True

    def become(self, graph_exec: int, launch: Launch | None) -> None:
        """Launch this from the next replay on, or nothing."""
        if launch is not None:
            launch.kernel.patch(graph_exec, self.handle, launch.grid, *launch.changed)
        if self.is_enabled != (launch is not None):
            set_enabled(graph_exec, self.handle, launch is not None)
            self.is_enabled = launch is not None


Launches = tuple[Launch | None, Launch | None, Launch | None]
"""Of one batch, K/V write, prefill and decode, as they follow each other; None where no request takes it."""

LaunchesOf = Callable[[TritonMetadata], Launches]
"""A batch's."""


class MovedLaunches:
    """A layer's launches over the tensors of another: `move` takes an address to the other's."""

    def __init__(self, launches: LaunchesOf, move: Callable[[int], int]) -> None:
        self._launches = launches
        self._move = move
        self._kernels: dict[PreparedKernel, PreparedKernel] = {}

    def __call__(self, metadata: TritonMetadata) -> Launches:
        kv_write, prefill, decode = self._launches(metadata)
        return self._moved(kv_write), self._moved(prefill), self._moved(decode)

    def _moved(self, launch: Launch | None) -> Launch | None:
        if launch is None:
            return None
        kernel = self._kernels.get(launch.kernel)
        if kernel is None:
            kernel = self._kernels[launch.kernel] = launch.kernel.moved(self._move)
        return Launch(kernel, launch.grid, launch.changed)


class AttentionNodes:
    """A layer's kernels in a graph, changed before a replay (`MovablePatch`).

    `mixed`: nodes of the three kernels. `decode`: where there is one, of batches that take nothing else; then the
    three are switched off.
    """

    def __init__(self, launches: LaunchesOf, mixed: Sequence[Node], decode: Node | None) -> None:
        self._launches = launches
        self._mixed = tuple(mixed)
        self._decode = decode
        self._patched_for: tuple[int, ...] | None = None

    def moved(self, nodes: Mapping[int, int], move: Callable[[int], int]) -> AttentionNodes:
        """Of a layer whose nodes are copies of these, all enabled."""
        decode = None if self._decode is None else Node(nodes[self._decode.handle])
        mixed = [Node(nodes[node.handle]) for node in self._mixed]
        return AttentionNodes(MovedLaunches(self._launches, move), mixed, decode)

    def __call__(self, graph_exec: int, metadata: AttentionMetadata) -> None:
        """Have the graph launch what this batch takes. Costs the host next to nothing for one like the one before."""
        assert isinstance(metadata, TritonMetadata), type(metadata)
        if metadata.launch_key == self._patched_for:
            return
        self._patched_for = None  # until all of it is done
        kv_write, prefill, decode = self._launches(metadata)
        if self._decode is not None:
            is_all = kv_write is None
            self._decode.become(graph_exec, decode if is_all else None)
            decode = None if is_all else decode
        for node, launch in zip(self._mixed, (kv_write, prefill, decode), strict=True):
            node.become(graph_exec, launch)
        self._patched_for = metadata.launch_key
