"""Nodes of a CUDA graph while it is being captured: what they are, and more of them.

Driver API, "Graph Management" and "Stream Management": a graph that a stream captures may be read and added to; what
the stream captures next follows the nodes that cuStreamUpdateCaptureDependencies names.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from piecegraph.compiler.graphs.cuda_driver import (
    BUFFER_POINTER,
    BUFFER_SIZE,
    END,
    KernelNodeParams,
    KernelParameter,
    ParameterBuffer,
    check,
    kernel_parameters,
    library,
)
from piecegraph.errors import CaptureError

_KERNEL, _MEMSET = 0, 2  # CU_GRAPH_NODE_TYPE_*
_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_EDGE_BYTES = 8  # of a CUgraphEdgeData
_WORD = struct.Struct("<Q")
_SYMBOLS = (
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphAddDependencies_v2",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphAddKernelNode_v2",
    "cuGraphKernelNodeCopyAttributes",
    "cuGraphMemsetNodeGetParams",
    "cuGraphAddMemsetNode",
    "cuFuncGetParamInfo",
    "cuKernelGetParamInfo",
)


class KernelContent(NamedTuple):
    """One launch of a kernel."""

    function: int  # a CUfunction's handle, or 0 where there is
    kernel: int  # a CUkernel's
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes  # all of them, as the kernel reads them


class MemsetContent(NamedTuple):
    """Numbers that are written to `[height, width]` elements."""

    address: int
    pitch: int
    value: int
    element_size: int
    width: int
    height: int


Content = KernelContent | MemsetContent

Edge = tuple[int, bytes]
"""The node that is waited for, and in which way (CUgraphEdgeData: a kernel may only wait for the other's trigger)."""


class NotCopied(Exception):
    """A node that is not to be copied, and why."""


class CopyFailed(CaptureError):
    """Copies were begun, and are not what was asked for: the recording they are in is to be made without any."""


class NodeMaker(Protocol):
    """Adds one node again and again, over other memory: what of a call of the driver stays is prepared once."""

    def add(self, words: Iterable[tuple[int, int]]) -> int:
        """A node that waits for nothing yet. `words`: offsets in bytes, the same in each call, and what of eight bytes
        is there in a kernel's parameters; of a memset the one at 0 is its address."""


class GraphEditor(Protocol):
    """What a copy of nodes needs of the graph that is being captured. Nodes are handles."""

    def nodes(self) -> Sequence[int]:
        """All of them, in the order they were made."""

    def read(self, node: int) -> Content:
        """Raises `NotCopied` for what is neither a kernel nor a memset."""

    def waits_for(self, node: int) -> Sequence[Edge]: ...

    def frontier(self) -> Sequence[Edge]:
        """What the next node of the stream is to wait for."""

    def maker(self, content: Content, like: int) -> NodeMaker:
        """Of nodes with this content; a kernel's other attributes are those of the node `like`."""

    def connect(self, kind: bytes, ahead: Sequence[int], nodes: Sequence[int]) -> None:
        """Each of these `nodes` is to wait for the one `ahead` in its place, in that way. One kind a call: the driver
        makes all edges of a call the first one's kind."""

    def set_frontier(self, edges: Sequence[Edge]) -> None: ...


class _MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def editing_unavailable_reason() -> str | None:
    """Why nodes cannot be copied with this driver, or None."""
    try:
        missing = [symbol for symbol in _SYMBOLS if not hasattr(library(), symbol)]
    except OSError:
        return "no CUDA driver is installed"
    return f"the CUDA driver lacks {', '.join(missing)}" if missing else None


class CapturedGraphEditor:
    """Of the graph that `stream` (a handle) captures now. Raises `CaptureError` where it captures none."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._graph, _ = self._capture()
        context = ctypes.c_void_p()
        check("cuCtxGetCurrent", library().cuCtxGetCurrent(ctypes.byref(context)))
        self._context = context
        self._layouts: dict[
            tuple[int, int], tuple[KernelParameter, ...]
        ] = {}  # by kernel: loaded as long as the graph is

    def nodes(self) -> Sequence[int]:
        count = ctypes.c_size_t()
        check("cuGraphGetNodes", library().cuGraphGetNodes(self._graph, None, ctypes.byref(count)))
        nodes = (ctypes.c_uint64 * count.value)()
        check("cuGraphGetNodes", library().cuGraphGetNodes(self._graph, nodes, ctypes.byref(count)))
        return list(nodes[: count.value])

    def read(self, node: int) -> Content:
        kind = ctypes.c_int()
        check("cuGraphNodeGetType", library().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value == _KERNEL:
            return self._read_kernel(node)
        if kind.value == _MEMSET:
            params = _MemsetParams()
            call = library().cuGraphMemsetNodeGetParams
            check("cuGraphMemsetNodeGetParams", call(ctypes.c_void_p(node), ctypes.byref(params)))
            return MemsetContent(*(getattr(params, name) for name, _ in _MemsetParams._fields_))
        raise NotCopied(f"a node of type {kind.value}, which is neither a kernel nor a memset")

    def waits_for(self, node: int) -> Sequence[Edge]:
        count = ctypes.c_size_t()
        call, handle = library().cuGraphNodeGetDependencies_v2, ctypes.c_void_p(node)
        check("cuGraphNodeGetDependencies", call(handle, None, None, ctypes.byref(count)))
        if count.value == 0:
            return []
        nodes, kinds = (ctypes.c_uint64 * count.value)(), (ctypes.c_char * (_EDGE_BYTES * count.value))()
        check("cuGraphNodeGetDependencies", call(handle, nodes, kinds, ctypes.byref(count)))
        return _edges(nodes, kinds.raw, count.value)

    def frontier(self) -> Sequence[Edge]:
        return self._capture()[1]

    def maker(self, content: Content, like: int) -> NodeMaker:
        if isinstance(content, MemsetContent):
            return _MemsetMaker(self._graph, content, self._context)
        return _KernelMaker(self._graph, content, like)

    def connect(self, kind: bytes, ahead: Sequence[int], nodes: Sequence[int]) -> None:
        added = library().cuGraphAddDependencies_v2(
            self._graph, _handles(ahead), _handles(nodes), kind * len(nodes), len(nodes)
        )
        check("cuGraphAddDependencies", added)

    def set_frontier(self, edges: Sequence[Edge]) -> None:
        nodes, kinds = _handles([node for node, _ in edges]), b"".join(kind for _, kind in edges)
        call = library().cuStreamUpdateCaptureDependencies_v2
        status = call(
            ctypes.c_void_p(self._stream), nodes, kinds, ctypes.c_size_t(len(edges)), ctypes.c_uint(_SET_DEPENDENCIES)
        )
        check("cuStreamUpdateCaptureDependencies", status)

    def _read_kernel(self, node: int) -> KernelContent:
        params = KernelNodeParams()
        call = library().cuGraphKernelNodeGetParams_v2
        check("cuGraphKernelNodeGetParams", call(ctypes.c_void_p(node), ctypes.byref(params)))
        if not params.function and not params.kernel:
            raise NotCopied("a kernel that the driver does not name")
        key = params.function or 0, params.kernel or 0
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = kernel_parameters(*key)
        buffer = bytearray(max((parameter.offset + parameter.size for parameter in layout), default=0))
        if params.kernel_params:
            values = (ctypes.c_void_p * len(layout)).from_address(params.kernel_params)
            for parameter, value in zip(layout, values, strict=True):
                buffer[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(value, parameter.size)
        elif params.extra:
            buffer[:] = _buffer_of(params.extra)
        elif layout:
            raise NotCopied("a kernel whose parameters the driver does not tell")
        return KernelContent(
            *key,
            (params.grid_x, params.grid_y, params.grid_z),
            (params.block_x, params.block_y, params.block_z),
            params.shared_bytes,
            bytes(buffer),
        )

    def _capture(self) -> tuple[ctypes.c_void_p, Sequence[Edge]]:
        status, count, graph = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_void_p()
        nodes, kinds = ctypes.POINTER(ctypes.c_uint64)(), ctypes.c_void_p()  # null: edges are all of the usual kind
        call = library().cuStreamGetCaptureInfo_v3
        found = call(
            ctypes.c_void_p(self._stream), ctypes.byref(status), None, ctypes.byref(graph), ctypes.byref(nodes),
            ctypes.byref(kinds), ctypes.byref(count),
        )  # fmt: skip
        check("cuStreamGetCaptureInfo", found)
        if status.value != 1:
            raise CaptureError(
                f"the stream's capture has status {status.value}; its nodes were wanted while it captures"
            )
        size = _EDGE_BYTES * count.value
        return graph, _edges(nodes, ctypes.string_at(kinds.value, size) if kinds.value else bytes(size), count.value)


class _KernelMaker:
    def __init__(self, graph: ctypes.c_void_p, content: KernelContent, like: int) -> None:
        self._buffer = ParameterBuffer(content.parameters)
        params = KernelNodeParams(
            content.function,
            *content.grid,
            *content.block,
            content.shared_bytes,
            None,
            self._buffer.extra,
            content.kernel,
        )
        self._graph, self._like, self._node = graph, like, ctypes.c_void_p()
        self._to_node, self._params = ctypes.byref(self._node), ctypes.byref(params)
        self._add, self._copy = library().cuGraphAddKernelNode_v2, library().cuGraphKernelNodeCopyAttributes

    def add(self, words: Iterable[tuple[int, int]]) -> int:
        for offset, word in words:
            _WORD.pack_into(self._buffer.content, offset, word)
        check("cuGraphAddKernelNode", self._add(self._to_node, self._graph, None, 0, self._params))
        node = self._node.value or 0
        check("cuGraphKernelNodeCopyAttributes", self._copy(node, self._like))
        return node


class _MemsetMaker:
    def __init__(self, graph: ctypes.c_void_p, content: MemsetContent, context: ctypes.c_void_p) -> None:
        self._graph, self._context, self._params = graph, context, _MemsetParams(*content)

    def add(self, words: Iterable[tuple[int, int]]) -> int:
        for _, address in words:
            self._params.address = address
        node = ctypes.c_void_p()
        added = library().cuGraphAddMemsetNode(
            ctypes.byref(node), self._graph, None, ctypes.c_size_t(0), ctypes.byref(self._params), self._context
        )
        check("cuGraphAddMemsetNode", added)
        return node.value or 0


def _buffer_of(extra: int) -> bytes:
    """The parameters of a kernel that was launched with all of them in one buffer."""
    found: dict[int, int] = {}
    place = extra
    while (key := ctypes.c_void_p.from_address(place).value or END) != END:
        found[key] = ctypes.c_void_p.from_address(place + 8).value or 0
        place += 16
    return ctypes.string_at(found[BUFFER_POINTER], ctypes.c_size_t.from_address(found[BUFFER_SIZE]).value)


def _edges(nodes: object, kinds: bytes, count: int) -> list[Edge]:
    return [(int(nodes[n]), kinds[_EDGE_BYTES * n : _EDGE_BYTES * (n + 1)]) for n in range(count)]  # type: ignore[index]


def _handles(nodes: Sequence[int]) -> object:
    return (ctypes.c_uint64 * len(nodes))(*nodes)
