"""Rates of a processor: of every dtype, in words, and over a matrix that no cache holds."""

from __future__ import annotations

import pytest
import torch

from piecegraph.tools.bench.measure import ceilings, cpu_rates
from piecegraph.tools.bench.measure.cpu_rates import CpuRates, measure_cpu_rates


def test_every_rate_is_measured() -> None:
    rates = measure_cpu_rates(1 << 16, 64)
    assert set(rates.gemm_flops_per_s) == {"float32", "bfloat16", "int8"}
    assert min(rates.copy_bytes_per_s, rates.read_bytes_per_s, *rates.gemm_flops_per_s.values()) > 0
    assert rates.num_threads == torch.get_num_threads()


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one second a run, the rates are the bytes and the operations themselves."""
    for module in (cpu_rates, ceilings):
        monkeypatch.setattr(module, "best_seconds", lambda run, device, repeats=20: 1.0)
    rates = measure_cpu_rates(1 << 16, 64)
    assert (rates.copy_bytes_per_s, rates.read_bytes_per_s) == (2 << 16, 1 << 16)
    assert rates.gemm_flops_per_s["int8"] == 2 * 64**3


def test_rates_in_words() -> None:
    rates = CpuRates(
        num_threads=2, copy_bytes_per_s=21.04e9, read_bytes_per_s=1.5e10, gemm_flops_per_s={"float32": 98.76e9}
    )
    assert str(rates) == "copy 21 GB/s, read 15 GB/s, GEMM of 1024^3 in GFLOP/s: float32 98.76 (2 threads)"


def test_the_floor_of_a_cpu_is_measured_beyond_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of a few megabytes stays in a cache, and its rate would be no floor of a model's weights."""
    monkeypatch.setattr(ceilings, "best_seconds", lambda run, device, repeats=20: 1.0)
    found = ceilings.measure_ceilings(torch.device("cpu"), torch.bfloat16)
    assert found.read_bytes_per_s == ceilings.BEYOND_CACHES == 256 << 20
    assert found.flops_per_s == 2 * 1024**3
