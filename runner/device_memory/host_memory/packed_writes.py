"""`PackedWrites`, writes to rows of a device tensor in one buffer of host memory that the device reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph.runner.device_memory.host_memory.uva import UvaBuffer

WORD_BYTES = 4
"""The number of bytes in a word of a buffer of packed writes."""


@dataclass(frozen=True, slots=True)
class PackedWrites:
    """Writes to disjoint cells of a tensor, packed into one buffer."""

    buffer: UvaBuffer
    """The `num_writes` rows, starts and (cumulative) ends of contents, then the contents from `first_content` on."""
    num_writes: int
    num_words: int
    longest: int  # the number of cells in the longest write
    first_content: int  # the index of a word, aligned to CONTENTS_ALIGNMENT

    def contents(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the written values `[ends[-1]]` as `dtype`, which must be the dtype that was packed."""
        return self.buffer.gpu[self.first_content : self.num_words].view(dtype)
