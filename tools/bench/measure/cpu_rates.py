"""What this machine's processor can do: the rate of its memory, and of matrix products by dtype.

Other programs that run meanwhile take their share, so a rate is what was there to have, and not the machine's best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from piecegraph.tools.bench.measure.ceilings import BEYOND_CACHES, best_seconds, read_rate

GEMM_SIZE = 1024
REPEATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """The rates of all threads of this process together, the best of several runs each."""

    num_threads: int
    copy_bytes_per_s: float  # read and written
    read_bytes_per_s: float  # by a matrix times a vector in float32, as decoding reads weights
    gemm_flops_per_s: dict[str, float]  # operations by dtype, of one square product; int8 sums are int32

    def __str__(self) -> str:
        gemms = ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in self.gemm_flops_per_s.items())
        return (
            f"copy {self.copy_bytes_per_s / 1e9:.3g} GB/s, read {self.read_bytes_per_s / 1e9:.3g} GB/s, GEMM of "
            f"{GEMM_SIZE}^3 in GFLOP/s: {gemms} ({self.num_threads} threads)"
        )


def measure_cpu_rates(copied_bytes: int = BEYOND_CACHES, gemm_size: int = GEMM_SIZE) -> CpuRates:
    """Measure the rates of this process's threads, in about a second on an idle machine. Takes `2 * copied_bytes`."""
    cpu = torch.device("cpu")
    source = torch.ones(copied_bytes // 4096, 1024)
    target = torch.empty_like(source)
    copy_s = best_seconds(lambda: target.copy_(source), cpu, REPEATS)
    return CpuRates(
        num_threads=torch.get_num_threads(),
        copy_bytes_per_s=2 * source.nbytes / copy_s,
        read_bytes_per_s=read_rate(source, cpu),
        gemm_flops_per_s={
            name: 2 * gemm_size**3 / best_seconds(product, cpu, REPEATS) for name, product in _products(gemm_size)
        },
    )


def _products(size: int) -> list[tuple[str, Callable[[], object]]]:
    square = torch.ones(size, size)
    half, whole = square.to(torch.bfloat16), square.to(torch.int8)
    return [
        ("float32", lambda: square @ square),
        ("bfloat16", lambda: half @ half),
        ("int8", lambda: torch._int_mm(whole, whole)),
    ]
