"""Host memory for what kernels read once, step after step: used again when they have read it."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from piecegraph.runner.uva import UvaTensor

SMALLEST = 1024
"""Words of the smallest buffer; every one has a power of two."""


class UvaBuffer:
    """Words that the host writes (`np`) and kernels read (`gpu`), both `[capacity]` int32."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._memory = UvaTensor((capacity,), torch.int32, device)
        self._is_read = torch.cuda.Event() if device.type == "cuda" else None
        self.np: npt.NDArray[np.int32] = self._memory.np
        self.gpu = self._memory.gpu

    def read_until_here(self) -> None:
        """All that reads it is launched, on the current stream; the ring may give it out again after that."""
        if self._is_read is not None:
            self._is_read.record()

    @property
    def is_free(self) -> bool:
        return self._is_read is None or self._is_read.query()


class UvaRing:
    """As many buffers of a size as are read at once, a few: a step allocates none and copies none.

    Nothing waits: while the oldest is still to be read, another is made. Keep the ring as long as anything reads
    from it; `UvaTensor` says why.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_capacity: dict[int, deque[UvaBuffer]] = {}  # the one used longest ago first

    def take(self, num_words: int) -> UvaBuffer:
        """A buffer of that many words or more, which nothing reads. Call its `read_until_here` before the next."""
        capacity = max(SMALLEST, 1 << (num_words - 1).bit_length())
        buffers = self._by_capacity.setdefault(capacity, deque())
        buffer = buffers.popleft() if buffers and buffers[0].is_free else UvaBuffer(capacity, self._device)
        buffers.append(buffer)
        return buffer
