"""What the driver is asked for when a node is made again: by a driver that notes it; a GPU's own is asked elsewhere."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.compiler.graphs import graph_editor
from piecegraph.compiler.graphs.cuda_driver import ParameterBuffer
from piecegraph.compiler.graphs.graph_editor import CapturedGraphEditor, KernelContent, MemsetContent
from piecegraph.errors import CaptureError

GRAPH, CONTEXT, LIKE = 11, 12, 13


class Driver:
    """Handles are 100 and what follows."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.alike: list[tuple[int, int]] = []
        self.edges: list[tuple[list[int], list[int], bytes]] = []
        self.result = 0

    def add_kernel(self, node: Any, graph: Any, ahead: None, num_ahead: int, params: Any) -> int:
        asked = params._obj
        grid, block = (asked.grid_x, asked.grid_y, asked.grid_z), (asked.block_x, asked.block_y, asked.block_z)
        parameters = graph_editor._buffer_of(asked.extra)
        self._make(node, graph, KernelContent(asked.function, asked.kernel, grid, block, 48, parameters))
        assert (asked.shared_bytes, asked.kernel_params, num_ahead) == (48, None, 0)
        return self.result

    def copy_attributes(self, node: int, like: int) -> int:
        self.alike.append((node, like))
        return 0

    def add_memset(self, node: Any, graph: Any, ahead: None, num_ahead: Any, params: Any, context: Any) -> int:
        assert (context.value, num_ahead.value) == (CONTEXT, 0)
        asked = params._obj
        self._make(node, graph, MemsetContent(*(getattr(asked, name) for name, _ in asked._fields_)))
        return self.result

    def add_dependencies(self, graph: Any, froms: Any, tos: Any, kinds: bytes, count: int) -> int:
        assert graph.value == GRAPH and count == len(froms) == len(tos)
        self.edges.append((list(froms), list(tos), kinds))
        return self.result

    def _make(self, node: Any, graph: Any, content: object) -> None:
        assert graph.value == GRAPH
        self.made.append(content)  # type: ignore[arg-type]
        node._obj.value = 99 + len(self.made)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    calls = SimpleNamespace(
        cuGraphAddKernelNode_v2=made.add_kernel,
        cuGraphKernelNodeCopyAttributes=made.copy_attributes,
        cuGraphAddMemsetNode=made.add_memset,
        cuGraphAddDependencies_v2=made.add_dependencies,
    )
    monkeypatch.setattr(graph_editor, "library", lambda: calls)
    return made


def editor() -> Any:
    """Of a stream that captures."""
    return SimpleNamespace(_graph=ctypes.c_void_p(GRAPH), _context=ctypes.c_void_p(CONTEXT))


def kernel(*words: int) -> KernelContent:
    return KernelContent(7, 8, (3, 4, 5), (128, 1, 2), 48, struct.pack(f"<{len(words)}Q", *words))


def test_parameters_are_found_by_what_describes_them() -> None:
    for content in (b"\x01\x00\x02and so on", bytes(40)):
        buffer = ParameterBuffer(content)
        assert graph_editor._buffer_of(buffer.extra) == content
    struct.pack_into("<Q", buffer.content, 8, 2**64 - 1)
    assert graph_editor._buffer_of(buffer.extra) == bytes(8) + 8 * b"\xff" + bytes(24)


def test_a_kernel_is_made_again_over_other_memory(driver: Driver) -> None:
    """Words that are not given stay; attributes are those of the node it is like."""
    maker = CapturedGraphEditor.maker(editor(), kernel(1, 2, 3, 4), LIKE)
    assert [maker.add([(8, 2**63 + 1), (24, 5)]), maker.add([(8, 6), (24, 7)])] == [100, 101]
    assert driver.made == [kernel(1, 2**63 + 1, 3, 5), kernel(1, 6, 3, 7)]
    assert driver.alike == [(100, LIKE), (101, LIKE)]


def test_a_memset_is_made_again_at_another_address(driver: Driver) -> None:
    content = MemsetContent(0x1000, 0, 3, 4, 16, 1)
    maker = CapturedGraphEditor.maker(editor(), content, LIKE)
    assert [maker.add([]), maker.add([(0, 0x2000)])] == [100, 101]
    assert driver.made == [content, content._replace(address=0x2000)]
    assert not driver.alike


def test_edges_of_a_call_are_all_of_one_kind(driver: Driver) -> None:
    CapturedGraphEditor.connect(editor(), b"\1\0\1\0\0\0\0\0", [5, 6], [8, 9])
    assert driver.edges == [([5, 6], [8, 9], 2 * b"\1\0\1\0\0\0\0\0")]


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.result = 2
    for content, call in ((kernel(1), "cuGraphAddKernelNode"), (MemsetContent(1, 0, 0, 1, 1, 1), "cuGraphAddMemset")):
        with pytest.raises(CaptureError, match=f"{call}.*error 2"):
            CapturedGraphEditor.maker(editor(), content, LIKE).add([])
    with pytest.raises(CaptureError, match="cuGraphAddDependencies.*error 2"):
        CapturedGraphEditor.connect(editor(), bytes(8), [5], [8])
