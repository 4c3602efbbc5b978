"""A GPU's memory apart from its addresses: the CUDA driver's calls for virtual memory, through ctypes.

Driver API: cuMemGetAllocationGranularity, cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap,
cuMemRelease, cuMemAddressFree, cuDeviceGet, cuDeviceGetAttribute. There is nothing to build.
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
    """What growing memory needs of a device. Sizes and addresses are multiples of `granularity`, in bytes."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """A range of addresses with nothing behind it."""

    def create(self, num_bytes: int) -> int:
        """Memory without an address, by handle. Raises `OutOfMemory` if the device has no more."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Put all of `handle`'s memory at `address`. Nothing may read or write it yet."""

    def set_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write what is mapped there."""

    def release(self, handle: int) -> None:
        """Give up a handle; its memory is freed once it is mapped nowhere."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory away from one or several whole mappings."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give a whole reserved range back."""

    def synchronize(self) -> None:
        """Wait until the device works on nothing."""

    def bytes_at(self, address: int, num_bytes: int, keeps: object) -> torch.Tensor:
        """A tensor `[num_bytes]` uint8 over a range whose first bytes are mapped; it and its views keep `keeps`."""


class CudaMemoryDriver:
    """`MemoryDriver` of one GPU. Any failure but a lack of memory raises `PiecegraphError` with the driver's code."""

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
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._properties), 0)
        return handle.value

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        _call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        _call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)

    def release(self, handle: int) -> None:
        _call("cuMemRelease", handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        _call("cuMemUnmap", address, num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        _call("cuMemAddressFree", address, num_bytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def bytes_at(self, address: int, num_bytes: int, keeps: object) -> torch.Tensor:
        view = torch.as_tensor(DeviceBytes(address, num_bytes, keeps), device=self._device)
        assert view.data_ptr() == address, f"torch copied the memory at {address:#x} instead of viewing it"
        return view


def unavailable_reason(device: torch.device) -> str | None:
    """Why `device` cannot have memory apart from its addresses, or None."""
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
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; the flags at its end, eight bytes, stay 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("allocation_flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DeviceBytes:
    """Tells torch of bytes on the GPU (CUDA array interface, version 3). A tensor made from it keeps it, and so
    `keeps`."""

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
