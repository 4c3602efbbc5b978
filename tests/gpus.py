"""Limits of GPUs that layouts are worked out for."""

from __future__ import annotations

from piecegraph.passes.kernels.gpu_limits import GpuLimits

H200 = GpuLimits(num_sms=132, shared_bytes=232448, can_overlap=True)
RTX_4090 = GpuLimits(num_sms=128, shared_bytes=99 * 2**10)
