"""The order of 4-bit weights in words of 32 bits, which a GPU unpacks by a shift and a mask for each two of them.

`WORD_COLUMNS` columns of the input have 16 words. Their four runs of 32 columns lie in different bits: word `j` has the
values `2 * j` and `2 * j + 1` of run `i` in its bits `4 * i` and `16 + 4 * i`. These two are neighbours in the register
that tensor cores take, and words are read one after another, so nothing moves between threads.
"""

from __future__ import annotations

import torch

WORD_COLUMNS = 128
"""The columns whose values share 16 words."""

RUN_COLUMNS = 32
"""The columns whose values have the same bits of these words."""


def to_words(values: torch.Tensor) -> torch.Tensor:
    """Return values from 0 to 15, `[..., size]`, in words: int32 `[..., size / 8]`. `WORD_COLUMNS` divides `size`."""
    runs = values.unflatten(-1, (-1, 4, RUN_COLUMNS // 2, 2))  # [..., blocks, runs, words, 2]
    words = torch.zeros_like(runs[..., 0, :, 0], dtype=torch.int32)
    for run in range(4):
        for half in range(2):  # few values are wide at one time
            words |= runs[..., run, :, half].to(torch.int32) << (16 * half + 4 * run)
    return words.flatten(-2)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """Return the values of words, the inverse of `to_words`, as uint8 `[..., 8 * n]` for `[..., n]`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(2, 4).t()  # [runs, 2]
    blocks = words.unflatten(-1, (-1, 1, RUN_COLUMNS // 2, 1))
    values: torch.Tensor = (blocks >> shifts[:, None]) & 15
    return values.to(torch.uint8).flatten(-4)
