"""The few calls of the CUDA driver that torch does not offer, or only at several times the host's time.

Driver API: cuStreamGetCaptureInfo, cuFuncGetParamInfo, cuGraphExecKernelNodeSetParams, cuGraphNodeSetEnabled change a
kernel inside a captured graph; cuMemcpyAsync, cuEventRecord, cuStreamWaitEvent are of every step. Called through
ctypes: there is nothing to build.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from piecegraph.errors import CaptureError

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: a parameter index past the last
_SUPPORTS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_SYMBOLS = (
    "cuStreamGetCaptureInfo_v3",
    "cuFuncGetParamInfo",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphNodeSetEnabled",
)


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class KernelParameter(NamedTuple):
    """Where one of a kernel's parameters lies in their buffer."""

    offset: int
    size: int  # bytes


def unavailable_reason() -> str | None:
    """Why kernels in a graph cannot be changed here, or None."""
    try:
        driver = library()
    except OSError:
        return "no CUDA driver is installed"
    missing = [symbol for symbol in _SYMBOLS if not hasattr(driver, symbol)]
    return f"the CUDA driver lacks {', '.join(missing)}" if missing else None


def driver_version() -> int:
    """As CUDA counts: 13000 for 13.0. Raises OSError where there is no driver."""
    version = ctypes.c_int()
    check("cuDriverGetVersion", library().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


@lru_cache(maxsize=64)
def has_virtual_memory(index: int) -> bool:
    """GPU `index` can have memory mapped to addresses that were reserved before (cuMemMap)."""
    device, is_supported = ctypes.c_int(), ctypes.c_int()
    check("cuDeviceGet", library().cuDeviceGet(ctypes.byref(device), index))
    told = library().cuDeviceGetAttribute(ctypes.byref(is_supported), _SUPPORTS_VIRTUAL_MEMORY, device)
    check("cuDeviceGetAttribute", told)
    return bool(is_supported.value)


def last_captured_node(stream: int) -> int:
    """The node that the capture on `stream` (a handle) would make the next one wait for: the last one it took.

    Raises `CaptureError` if nothing is being captured there, or if the stream waits for several nodes.
    """
    status, count = ctypes.c_int(), ctypes.c_size_t()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    check(
        "cuStreamGetCaptureInfo",
        library().cuStreamGetCaptureInfo_v3(
            ctypes.c_void_p(stream), ctypes.byref(status), None, None, ctypes.byref(nodes), None, ctypes.byref(count)
        ),
    )
    if status.value != 1 or count.value != 1:
        raise CaptureError(f"{count.value} nodes in a capture of status {status.value}; one node of an active capture")
    node = nodes[0]
    assert node is not None
    return int(node)


def kernel_parameters(function: int, kernel: int = 0) -> tuple[KernelParameter, ...]:
    """The parameters of a loaded kernel, in order: of a CUfunction's handle or, where that is 0, a CUkernel's."""
    found: list[KernelParameter] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    tell = library().cuFuncGetParamInfo if function else library().cuKernelGetParamInfo
    while True:
        result = tell(
            ctypes.c_void_p(function or kernel), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        )
        if result == _INVALID_VALUE:
            return tuple(found)
        check("cuFuncGetParamInfo", result)
        found.append(KernelParameter(offset.value, size.value))


class ParameterBuffer:
    """All parameters of a kernel in one buffer, which the driver copies in each call that is given `extra`."""

    def __init__(self, content: bytes) -> None:
        self.content = ctypes.create_string_buffer(content, len(content))
        self._num_bytes = ctypes.c_size_t(len(content))
        self._extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(self.content), BUFFER_SIZE, ctypes.addressof(self._num_bytes), END
        )

    @property
    def extra(self) -> int:
        """The address of what describes it, as a node's `extra`; no longer than this object lives."""
        return ctypes.addressof(self._extra)


class KernelNodeUpdate:
    """What a kernel node is changed to. The driver copies it when `apply` is called, so one serves many nodes."""

    def __init__(self, function: int, *, num_threads: int, shared_bytes: int, parameter_bytes: int) -> None:
        self._buffer = ParameterBuffer(bytes(parameter_bytes))
        self.parameters = self._buffer.content
        self._params = KernelNodeParams(
            function=function,
            block_x=num_threads,
            block_y=1,
            block_z=1,
            shared_bytes=shared_bytes,
            extra=self._buffer.extra,
        )
        self._reference = ctypes.byref(self._params)
        self._set_params = library().cuGraphExecKernelNodeSetParams_v2

    def apply(self, graph_exec: int, node: int, grid: tuple[int, int, int]) -> None:
        """Change `node` of an instantiated graph for replays from now on; those under way are not affected."""
        self._params.grid_x, self._params.grid_y, self._params.grid_z = grid
        check("cuGraphExecKernelNodeSetParams", self._set_params(graph_exec, node, self._reference))


def set_enabled(graph_exec: int, node: int, is_enabled: bool) -> None:
    """Whether replays from now on run `node`."""
    check("cuGraphNodeSetEnabled", library().cuGraphNodeSetEnabled(graph_exec, node, int(is_enabled)))


class TwoCopies(NamedTuple):
    """A copy on the device, and one of that to pinned memory beside what the device does next; all by handle and
    address. Nobody keeps the memory for the caller until it has run: torch's allocators do not see this. An event has
    a handle once torch has recorded it."""

    kept: int
    host: int
    is_kept: int  # an event
    is_copied: int  # an event, recorded when `host` is there
    copy_stream: int

    def start(self, source: int, num_bytes: int, stream: int) -> None:
        """`source` may be written again by what comes next on `stream`."""
        driver = library()
        failed = (
            driver.cuMemcpyAsync(self.kept, source, num_bytes, stream)
            or driver.cuEventRecord(self.is_kept, stream)
            or driver.cuStreamWaitEvent(self.copy_stream, self.is_kept, 0)
            or driver.cuMemcpyAsync(self.host, self.kept, num_bytes, self.copy_stream)
            or driver.cuEventRecord(self.is_copied, self.copy_stream)
        )
        check("a copy to the host by calls", failed)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The driver's. Raises OSError where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, number = ctypes.c_void_p, ctypes.c_uint
    for name, arguments in (
        ("cuGraphExecKernelNodeSetParams_v2", [handle, handle, ctypes.c_void_p]),
        ("cuGraphNodeSetEnabled", [handle, handle, number]),
        ("cuGraphAddKernelNode_v2", [handle, handle, handle, ctypes.c_size_t, handle]),
        ("cuGraphKernelNodeCopyAttributes", [handle, handle]),
        ("cuGraphAddDependencies_v2", [handle, handle, handle, ctypes.c_char_p, ctypes.c_size_t]),
        ("cuMemcpyAsync", [handle, handle, ctypes.c_size_t, handle]),
        ("cuEventRecord", [handle, handle]),
        ("cuStreamWaitEvent", [handle, handle, number]),
    ):
        if hasattr(driver, name):
            getattr(driver, name).argtypes = arguments
    return driver


def check(call: str, result: int) -> None:
    if result != 0:
        raise CaptureError(f"{call} of the CUDA driver failed with error {result}.")
