"""Limits of GPUs that layouts are worked out for."""

from __future__ import annotations

from piecegraph.passes.kernels.common.gpu_limits import H200, GpuLimits

__all__ = ["H200", "RTX_4090"]

RTX_4090 = GpuLimits(num_sms=128, shared_bytes=99 * 2**10)
