"""What a launch's layout has to know about the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from piecegraph.passes.kernels.capability import MIN_OVERLAP_CAPABILITY


@dataclass(frozen=True, slots=True)
class GpuLimits:
    num_sms: int
    shared_bytes: int  # of shared memory, at most, that a program may use
    can_overlap: bool = False  # a kernel may start before the one ahead has ended (`passes/kernels/overlapped.py`)

    @classmethod
    def of(cls, device: torch.device) -> GpuLimits:
        properties = torch.cuda.get_device_properties(device)
        shared_bytes: int = getattr(properties, "shared_memory_per_block_optin", 99 * 2**10)  # not in torch's types
        return cls(
            properties.multi_processor_count,
            shared_bytes,
            (properties.major, properties.minor) >= MIN_OVERLAP_CAPABILITY,
        )


H200 = GpuLimits(num_sms=132, shared_bytes=232448, can_overlap=True)
"""The GPU that layouts were measured on, and one that is assumed where there is none."""


@lru_cache(maxsize=64)
def gpu_limits(index: int) -> GpuLimits:
    """Of a device, by its index; a call costs next to nothing."""
    return GpuLimits.of(torch.device("cuda", index))
