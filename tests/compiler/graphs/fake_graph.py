"""A graph that is being captured, as a `GraphEditor` sees it, without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from piecegraph.compiler.graphs.graph_editor import Content, Edge, KernelContent, MemsetContent, NotCopied
from piecegraph.errors import CaptureError

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
        self.room: int | None = None  # copies that can be made; None: any number

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

    def maker(self, content: Content, like: int) -> _Maker:
        return _Maker(self, content, like)

    def connect(self, kind: bytes, ahead: Sequence[int], nodes: Sequence[int]) -> None:
        for waited, node in zip(ahead, nodes, strict=True):
            self.edges[node].append((waited, EARLY if self.lies else kind))

    def set_frontier(self, edges: Sequence[Edge]) -> None:
        self.front = list(edges)

    def _make(self, content: Content) -> int:
        handle = 1000 + len(self.contents)
        self.contents[handle] = content
        return handle


class _Maker:
    def __init__(self, graph: FakeGraph, content: Content, like: int) -> None:
        self._graph, self._content, self._like = graph, content, like

    def add(self, words: Iterable[tuple[int, int]]) -> int:
        content = self._content
        for offset, word in words:
            if isinstance(content, MemsetContent):
                assert offset == 0
                content = content._replace(address=word)
            else:
                parameters = bytearray(content.parameters)
                struct.pack_into("<Q", parameters, offset, word)
                content = content._replace(parameters=bytes(parameters))
        if self._graph.room is not None and len(self._graph.copies) >= self._graph.room:
            raise CaptureError("cuGraphAddKernelNode of the CUDA driver failed with error 2.")
        handle = self._graph._make(content)
        self._graph.copies[handle] = self._like
        self._graph.edges[handle] = []
        return handle
