"""The few calls of the CUDA driver that torch does not offer, or offers at several times the cost on the host.

cuStreamGetCaptureInfo, cuFuncGetParamInfo, cuGraphExecKernelNodeSetParams and cuGraphNodeSetEnabled change a kernel
inside a captured graph; every step uses cuMemcpyAsync, cuEventRecord and cuStreamWaitEvent. The driver is called
through ctypes rather than cuda-bindings: some of these calls are in every step, and what cuda-bindings costs there has
not been measured on a GPU.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from piecegraph.errors import CaptureError

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: a parameter index past the last
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_SYMBOLS = (
    "cuStreamGetCaptureInfo_v3",
    "cuFuncGetParamInfo",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphNodeSetEnabled",
)


class KernelNodeParams(ctypes.Structure):
    """The driver's structure CUDA_KERNEL_NODE_PARAMS_v2."""

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
    """The position of one kernel parameter in the buffer of all parameters, in bytes."""

    offset: int
    size: int  # bytes


def unavailable_reason() -> str | None:
    """Return why kernels in a captured graph cannot be changed on this machine; None where they can."""
    try:
        driver = library()
    except OSError:
        return "no CUDA driver is installed"
    missing = [symbol for symbol in _SYMBOLS if not hasattr(driver, symbol)]
    return f"the CUDA driver lacks {', '.join(missing)}" if missing else None


def driver_version() -> int:
    """Return the version of the CUDA driver as CUDA counts: 13000 for 13.0. Raises `OSError` without a driver."""
    version = ctypes.c_int()
    check("cuDriverGetVersion", library().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


def last_captured_node(stream: int) -> int:
    """Return the node that the capture on `stream` (a handle) took last, on which the next node will depend.

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
        raise CaptureError(
            f"{count.value} nodes in a capture of status {status.value}; wanted one node of an active capture"
        )
    node = nodes[0]
    assert node is not None
    return int(node)


def kernel_parameters(function: int) -> tuple[KernelParameter, ...]:
    """Return the parameters of a loaded kernel (`function`: a CUfunction's handle), in order."""
    found: list[KernelParameter] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        result = library().cuFuncGetParamInfo(
            ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        )
        if result == _INVALID_VALUE:
            return tuple(found)
        check("cuFuncGetParamInfo", result)
        found.append(KernelParameter(offset.value, size.value))


class KernelNodeUpdate:
    """The new state of a kernel node. The driver copies the state in `apply`, so one update serves many nodes."""

    def __init__(self, function: int, *, num_threads: int, shared_bytes: int, parameter_bytes: int) -> None:
        self.parameters = ctypes.create_string_buffer(parameter_bytes)
        self._num_bytes = ctypes.c_size_t(parameter_bytes)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self.parameters), _BUFFER_SIZE, ctypes.addressof(self._num_bytes), _END
        )
        self._params = KernelNodeParams(
            function=function,
            block_x=num_threads,
            block_y=1,
            block_z=1,
            shared_bytes=shared_bytes,
            extra=ctypes.addressof(self._extra),
        )
        self._reference = ctypes.byref(self._params)
        self._set_params = library().cuGraphExecKernelNodeSetParams_v2

    def apply(self, graph_exec: int, node: int, grid: tuple[int, int, int]) -> None:
        """Change `node` of an instantiated graph for later replays; replays under way are not affected."""
        self._params.grid_x, self._params.grid_y, self._params.grid_z = grid
        check("cuGraphExecKernelNodeSetParams", self._set_params(graph_exec, node, self._reference))


def set_enabled(graph_exec: int, node: int, is_enabled: bool) -> None:
    """Enable or disable `node` of an instantiated graph for later replays. Raises `CaptureError`."""
    check("cuGraphNodeSetEnabled", library().cuGraphNodeSetEnabled(graph_exec, node, int(is_enabled)))


class StagedHostCopy(NamedTuple):
    """A copy to the host in two stages: within the device, and from there to pinned memory on a stream of its own.

    All fields are addresses or handles. torch's allocators do not see these copies, so the caller keeps the memory
    alive until they have run. An event has a handle once torch has recorded it.
    """

    kept: int  # address of the copy on the device
    host: int  # address of the pinned copy
    is_kept: int  # event, recorded when `kept` is written
    is_copied: int  # event, recorded when `host` is written
    copy_stream: int

    def start(self, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue both copies of `num_bytes` bytes at address `source`.

        Later work on `stream` may overwrite `source`. Raises `CaptureError` where the driver refuses a call.
        """
        driver = library()
        failed = (
            driver.cuMemcpyAsync(self.kept, source, num_bytes, stream)
            or driver.cuEventRecord(self.is_kept, stream)
            or driver.cuStreamWaitEvent(self.copy_stream, self.is_kept, 0)
            or driver.cuMemcpyAsync(self.host, self.kept, num_bytes, self.copy_stream)
            or driver.cuEventRecord(self.is_copied, self.copy_stream)
        )
        check("an asynchronous copy to the host", failed)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the CUDA driver's library. Raises `OSError` where no driver is installed."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, number = ctypes.c_void_p, ctypes.c_uint
    for name, arguments in (
        ("cuGraphExecKernelNodeSetParams_v2", [handle, handle, ctypes.c_void_p]),
        ("cuGraphNodeSetEnabled", [handle, handle, number]),
        ("cuMemcpyAsync", [handle, handle, ctypes.c_size_t, handle]),
        ("cuEventRecord", [handle, handle]),
        ("cuStreamWaitEvent", [handle, handle, number]),
    ):
        if hasattr(driver, name):
            getattr(driver, name).argtypes = arguments
    return driver


def check(call: str, result: int) -> None:
    """Raise `CaptureError`, which names `call`, unless the driver's `result` is 0."""
    if result != 0:
        raise CaptureError(f"{call} of the CUDA driver failed with error {result}.")
