"""Memory of the CUDA driver's own, for a moment: not torch's allocator's, which would keep what it had found.

Driver API, "Memory Management": cuMemAlloc, cuMemFree.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from piecegraph.compiler.graphs.cuda_driver import check, library
from piecegraph.runner.cuda_memory import DeviceBytes


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
        yield torch.as_tensor(DeviceBytes(address.value or 0, size, keeps=None), device=device)
    finally:
        torch.cuda.synchronize(device)
        check("cuMemFree", library().cuMemFree_v2(address))
