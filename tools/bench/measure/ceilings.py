"""The best rates of the device, measured in the same run as the figures that are compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BEYOND_CACHES = 256 << 20
"""Bytes of which the caches of a processor hold the smaller part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates of one device."""

    read_bytes_per_s: float  # by a matrix times a vector, as decoding reads weights
    flops_per_s: float  # by a large square matmul


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the best of several runs of one large matvec and one large matmul of `dtype`.

    On a CPU the matvec is in float32, whose kernel takes bytes as fast as memory gives them; that of bfloat16 does not.
    """
    if device.type == "cuda":
        size, matrix = 8192, torch.randn(32768, 8192, device=device, dtype=dtype)
    else:
        size, matrix = 1024, torch.ones(BEYOND_CACHES // 4096, 1024)
    square = torch.randn(size, size, device=device, dtype=dtype)
    matmul_s = best_seconds(lambda: square @ square, device)
    return Ceilings(read_bytes_per_s=read_rate(matrix, device), flops_per_s=2 * size**3 / matmul_s)


def read_rate(matrix: torch.Tensor, device: torch.device) -> float:
    """Return the bytes a second of `matrix` that a product with a vector reads."""
    vector = torch.randn(matrix.shape[1], device=device, dtype=matrix.dtype)
    return matrix.nbytes / best_seconds(lambda: matrix @ vector, device)


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
