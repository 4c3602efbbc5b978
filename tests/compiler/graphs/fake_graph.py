"""A graph that is being captured, as a `GraphEditor` sees it, without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from piecegraph.compiler.graphs.graph_editor import Content, Edge, KernelContent, NotCopied

PLAIN, EARLY = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
"""Edges: the whole kernel is waited for, or its trigger."""


def kernel(*words: int, function: int = 7, grid: int = 4) -> KernelContent:
    """A launch that is given these numbers of eight bytes."""
    return KernelContent(function, 0, (grid, 1, 1), (128, 1, 1), 0, struct.pack(f"<{len(words)}Q", *words))


class FakeGraph:
    """Handles are numbers from 1000 on. `other`: nodes that cannot be read."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.edges: dict[int, list[Edge]] = {}
        self.front: list[Edge] = []
        self.other: set[int] = set()
        self.copies: dict[int, int] = {}  # whose attributes a node has
        self.lies = False

    def launch(self, content: Content, kind: bytes = EARLY) -> int:
        """As a stream does: behind what it launched before."""
        handle = self._make(content)
        self.edges[handle] = [(node, kind) for node, _ in self.front]
        self.front = [(handle, PLAIN)]
        return handle

    def whole(self) -> list[tuple[Content, list[tuple[int, bytes]]]]:
        """Nodes, and the places of those that they wait for."""
        places = {handle: place for place, handle in enumerate(self.contents)}
        return [(self.contents[h], sorted((places[node], kind) for node, kind in self.edges[h])) for h in self.contents]

    def nodes(self) -> Sequence[int]:
        return list(self.contents)

    def read(self, node: int) -> Content:
        if node in self.other:
            raise NotCopied("a node of type 1, which is neither a kernel nor a memset")
        return self.contents[node]

    def waits_for(self, node: int) -> Sequence[Edge]:
        return self.edges[node]

    def frontier(self) -> Sequence[Edge]:
        return self.front

    def add(self, content: Content, like: int) -> int:
        handle = self._make(content)
        self.copies[handle] = like
        self.edges[handle] = []
        return handle

    def connect(self, edges: Mapping[int, Sequence[Edge]]) -> None:
        for node, waited in edges.items():
            self.edges[node] += [(ahead, EARLY) for ahead, _ in waited] if self.lies else waited

    def set_frontier(self, edges: Sequence[Edge]) -> None:
        self.front = list(edges)

    def _make(self, content: Content) -> int:
        handle = 1000 + len(self.contents)
        self.contents[handle] = content
        return handle
