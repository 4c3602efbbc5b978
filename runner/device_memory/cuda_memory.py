"""Virtual memory management of the CUDA driver through ctypes: addresses are reserved apart from memory.

Driver API: cuMemGetAllocationGranularity, cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap,
cuMemRelease, cuMemAddressFree, cuDeviceGet, cuDeviceGetAttribute. ctypes stays in place of cuda-bindings, because
these calls run on a GPU only, and their replacement has not been tried on one.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Protocol

import torch

from piecegraph.errors import OutOfMemory, PiecegraphError

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SUPPORTS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0

_ADDRESS, _SIZE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
_POINTER, _HANDLE = ctypes.c_void_p, ctypes.c_uint64
_CALLS: dict[str, tuple[type, ...]] = {
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDeviceGetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _FLAGS),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemRelease": (_HANDLE,),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
}


class MemoryDriver(Protocol):
    """The device operations that growing memory needs. Sizes and addresses are multiples of `granularity` bytes."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """Reserve a range of addresses without memory, and return the first address."""

    def create(self, num_bytes: int) -> int:
        """Allocate memory without an address, and return its handle. Raises `OutOfMemory`."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map all of the memory of `handle` at `address`. It may not be accessed before `set_access`."""

    def set_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write the memory that is mapped in the range."""

    def release(self, handle: int) -> None:
        """Release a handle; its memory is freed once no mapping of it is left."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap one or several whole mappings."""

    def free(self, address: int, num_bytes: int) -> None:
        """Free a whole reserved range of addresses."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def bytes_at(self, address: int, num_bytes: int, keeps: object) -> torch.Tensor:
        """Return a tensor `[num_bytes]` uint8 over a range whose first bytes are mapped.

        The tensor and its views keep `keeps` alive.
        """


class CudaMemoryDriver:
    """The `MemoryDriver` of one GPU.

    A failure other than a lack of memory raises `PiecegraphError` with the driver's error code.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        index = device.index if device.index is not None else torch.cuda.current_device()
        location = _Location(type=_ON_DEVICE, id=index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location=location, flags=_READ_WRITE)
        size = ctypes.c_size_t()
        self.synchronize()  # CUDA is set up, and this thread has the device's context
        _call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), _MINIMUM)
        self.granularity = size.value

    def reserve(self, num_bytes: int) -> int:
        """Reserve a range of addresses without memory, and return the first address."""
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def create(self, num_bytes: int) -> int:
        """Allocate memory without an address, and return its handle. Raises `OutOfMemory`."""
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._properties), 0)
        return handle.value

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map all of the memory of `handle` at `address`. It may not be accessed before `set_access`."""
        _call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write the memory that is mapped in the range."""
        _call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)

    def release(self, handle: int) -> None:
        """Release a handle; its memory is freed once no mapping of it is left."""
        _call("cuMemRelease", handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap one or several whole mappings."""
        _call("cuMemUnmap", address, num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        """Free a whole reserved range of addresses."""
        _call("cuMemAddressFree", address, num_bytes)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self._device)

    def bytes_at(self, address: int, num_bytes: int, keeps: object) -> torch.Tensor:
        """Return a tensor `[num_bytes]` uint8 over a range whose first bytes are mapped, which keeps `keeps` alive."""
        view = torch.as_tensor(DeviceBytes(address, num_bytes, keeps), device=self._device)
        assert view.data_ptr() == address, f"torch copied the memory at {address:#x} instead of viewing it"
        return view


def unavailable_reason(device: torch.device) -> str | None:
    """Return why `device` does not support virtual memory management, or None if it does."""
    if device.type != "cuda":
        return f"{device.type} is not an NVIDIA GPU"
    try:
        library = _library()
    except OSError:
        return "no CUDA driver is installed"
    missing = [name for name in _CALLS if not hasattr(library, name)]
    if missing:
        return f"the CUDA driver lacks {', '.join(missing)}"
    ordinal, is_supported = ctypes.c_int(), ctypes.c_int()
    torch.cuda.synchronize(device)  # the driver answers nothing before CUDA is set up
    index = device.index if device.index is not None else torch.cuda.current_device()
    _call("cuDeviceGet", ctypes.byref(ordinal), index)
    _call("cuDeviceGetAttribute", ctypes.byref(is_supported), _SUPPORTS_VIRTUAL_MEMORY, ordinal)
    return None if is_supported.value else "the GPU does not support virtual memory management"


class _Location(ctypes.Structure):
    """The driver's CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp, whose last eight bytes of flags stay 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("allocation_flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DeviceBytes:
    """Bytes on the GPU presented to torch through the CUDA array interface, version 3.

    A tensor made from this object keeps it, and so `keeps`, alive.
    """

    def __init__(self, address: int, num_bytes: int, keeps: object) -> None:
        self._keeps = keeps
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",  # torch views it as any other type: the interface knows no bfloat16
            "data": (address, False),  # False: not read-only, as torch has no read-only tensors
            "strides": None,  # contiguous
            "version": 3,
        }


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _CALLS.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = arguments
    return library


def _call(name: str, *arguments: object) -> None:
    result = getattr(_library(), name)(*arguments)
    if result == _OUT_OF_MEMORY:
        raise OutOfMemory(f"{name} of the CUDA driver found no memory left; give the cache less of it.")
    if result != 0:
        raise PiecegraphError(f"{name} of the CUDA driver failed with error {result}.")
