"""Limits of GPUs that layouts are worked out for."""

from __future__ import annotations

from piecegraph.passes.kernels.common.gpu_limits import H200, GpuLimits

__all__ = ["A100", "H200", "RTX_4090", "SHARED_BYTES"]

A100 = GpuLimits(num_sms=108, shared_bytes=163 * 2**10)
RTX_4090 = GpuLimits(num_sms=128, shared_bytes=99 * 2**10)

SHARED_BYTES = {80: A100.shared_bytes, 89: RTX_4090.shared_bytes, 90: H200.shared_bytes}
"""The most shared memory that a program may use, by compute capability."""
