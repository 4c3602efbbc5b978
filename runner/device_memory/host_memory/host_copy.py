"""Asynchronous copies from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    values: Sequence[int] | Sequence[float] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return `values` as a tensor on `device`, without waiting for the copy.

    For a GPU the values go through fresh pinned memory, which torch's caching host allocator keeps until the stream
    has executed the copy, so the caller neither waits nor keeps a buffer.
    """
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)  # torch takes no negative strides
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.as_tensor(values, dtype=dtype).pin_memory()  # `torch.tensor` pins nothing that comes from numpy
    return pinned.to(device, non_blocking=True)
