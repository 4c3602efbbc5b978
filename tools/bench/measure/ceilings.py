"""The best rates of the device, measured in the same run as the figures that are compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates of one device."""

    read_bytes_per_s: float  # by a matrix times a vector, as decoding reads weights
    flops_per_s: float  # by a large square matmul


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the best of several runs of one large matvec and one large matmul."""
    rows, size = (32768, 8192) if device.type == "cuda" else (4096, 1024)
    matrix = torch.randn(rows, size, device=device, dtype=dtype)
    vector = torch.randn(size, device=device, dtype=dtype)
    square = torch.randn(size, size, device=device, dtype=dtype)
    read_s = best_seconds(lambda: matrix @ vector, device)
    matmul_s = best_seconds(lambda: square @ square, device)
    return Ceilings(
        read_bytes_per_s=matrix.numel() * matrix.element_size() / read_s, flops_per_s=2 * size**3 / matmul_s
    )


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the seconds of the fastest of `repeats` runs, by CUDA events on a GPU."""
    for _ in range(3):
        run()
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
    return min(seconds)
