"""The limits that a kernel's launch layout depends on: those of the GPU, and the sizes that follow from them.

This module imports no Triton, so passes and ops can read the limits on a machine without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

MIN_OVERLAP_CAPABILITY = (9, 0)
"""The first compute capability that has programmatic dependent launch (`overlapped.py`)."""

SMALL_WEIGHT_BYTES = 16 * 2**20
"""The most bytes of a weight that all multiprocessors read in one wave of programs (4 TB/s, 132 multiprocessors)."""

MIDDLE_WEIGHT_BYTES = 64 * 2**20
"""The most bytes of a weight for which a linear of few rows is streamed in one wave of programs, whatever the length of
its tiles. The library reads larger weights as fast as short tiles do."""

MAX_NORM_SIZE = 16384
"""The most numbers in a row that is normed: a longer row does not fit in the registers of the kernel's program."""

MAX_NORM_LINEAR_SIZE = 8192
"""The most numbers in a row that a kernel norms and multiplies by a weight: each of its programs holds the row."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The properties of a GPU that launch layouts depend on."""

    num_sms: int
    shared_bytes: int  # the most shared memory that a program may use
    can_overlap: bool = False  # a kernel may start before the preceding kernel has ended (`overlapped.py`)

    @classmethod
    def of(cls, device: torch.device) -> GpuLimits:
        """Return the limits of `device`, a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        shared_bytes: int = getattr(properties, "shared_memory_per_block_optin", 99 * 2**10)  # not in torch's types
        return cls(
            properties.multi_processor_count,
            shared_bytes,
            (properties.major, properties.minor) >= MIN_OVERLAP_CAPABILITY,
        )


H200 = GpuLimits(num_sms=132, shared_bytes=232448, can_overlap=True)
"""The limits of the GPU that layouts were measured on, which are assumed where there is no GPU."""


@lru_cache(maxsize=64)
def gpu_limits(index: int) -> GpuLimits:
    """Return the limits of the CUDA device with `index`. A repeated call costs next to nothing."""
    return GpuLimits.of(torch.device("cuda", index))


def limits_of(device: torch.device) -> GpuLimits:
    """Return the limits of a GPU; for a CPU, where kernels are interpreted, those of an H200."""
    return gpu_limits(device.index or 0) if device.type == "cuda" else H200
