"""Copies from the host that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`.

    On a GPU through fresh pinned memory: the copy runs when the stream gets there, and the caching
    host allocator keeps the memory until then, so the caller neither waits nor guards a buffer.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
