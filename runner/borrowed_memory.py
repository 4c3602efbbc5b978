"""Memory of the CUDA driver's own, for a moment: not torch's allocator's, which would keep what it had found.

Driver API, "Memory Management": cuMemAlloc, cuMemFree.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from piecegraph.compiler.graphs.cuda_driver import check, library


class _DriverMemory:
    """As torch takes another library's memory (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@contextlib.contextmanager
def borrowed(device: torch.device, size: int) -> Iterator[torch.Tensor]:
    """`[size]` uint8 on `device`, not initialised; no view of it may live after the block.

    It waits for the device before memory is taken, and before it is given back. Raises `CaptureError` where the driver
    has no such memory.
    """
    torch.cuda.synchronize(device)  # the device's context is this thread's from here on
    address = ctypes.c_void_p()
    check("cuMemAlloc", library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    try:
        yield torch.as_tensor(_DriverMemory(address.value or 0, size), device=device)
    finally:
        torch.cuda.synchronize(device)
        check("cuMemFree", library().cuMemFree_v2(address))
