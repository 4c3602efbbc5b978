"""A table on the device with one row a request, which the host writes without waiting."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device

_FLOAT32_MAX = 3.4028234663852886e38


class StagedRows:
    """A table `words` `[num_rows, width]` int32 of the parameters that requests give to an option.

    Rows are staged on the host and written together, with one copy. A row longer than the table widens
    the table (to a power of two), so an option that no request uses takes no memory; a shorter row is filled up by
    repeating its last `unit` words, so that a reader needs no lengths where repetition is harmless.
    """

    def __init__(self, num_rows: int, device: torch.device, *, width: int = 0, unit: int = 1) -> None:
        self.words = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._unit = unit
        self._staged: dict[int, Sequence[int]] = {}

    def stage(self, row: int, words: Sequence[int]) -> None:
        """Stage `words` for `row`, for the next `apply_staged_writes`; the last of several calls wins."""
        self._staged[row] = words

    def discard(self, row: int) -> None:
        """Discard the words that are staged for a row, if any."""
        self._staged.pop(row, None)

    def apply_staged_writes(self) -> None:
        """Write the staged rows: one copy to the device, or none. Mutates `words`, or replaces it by a wider table."""
        if not self._staged:
            return
        self._widen(max(map(len, self._staged.values())))
        width = self.words.shape[1]
        packed = list(self._staged)
        for words in self._staged.values():
            missing = width - len(words)
            packed += words
            packed += (list(words[-self._unit :]) * missing)[:missing]
        sent = to_device(packed, torch.int32, self.words.device)
        num_staged = len(self._staged)
        self.words.index_copy_(0, sent[:num_staged].long(), sent[num_staged:].view(num_staged, width))
        self._staged.clear()

    def _widen(self, wanted: int) -> None:
        num_rows, width = self.words.shape
        if wanted <= width:
            return
        words = self.words.new_zeros(num_rows, 1 << (wanted - 1).bit_length())
        words[:, :width] = self.words
        if width:
            repeats = (words.shape[1] - width) // self._unit
            words[:, width:] = self.words[:, -self._unit :].repeat(1, repeats)
        self.words = words


def float_word(value: float) -> int:
    """Return the bits of `value` as float32, as a signed word; finite values are clamped to the range of float32."""
    if not math.isinf(value):
        value = min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX)
    word: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return word


def long_words(value: int) -> tuple[int, int]:
    """Return a signed 64-bit number as two words, the low one first, as in memory."""
    low, high = struct.unpack("<2i", struct.pack("<q", value))
    return low, high
