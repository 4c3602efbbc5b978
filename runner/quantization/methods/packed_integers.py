"""Integers of a few bits that are stored in int32, several in each."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpacked(packed: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return the integers of `packed`, int32 `[rows, columns]`, as uint8; `dim` is as many times as long.

    The first integer is in the lowest bits. `order`: for each integer of a group, its place in the int32; None: their
    own places.
    """
    per_word = 32 // bits
    places = torch.tensor(range(per_word) if order is None else order, dtype=torch.int32) * bits
    words = packed.movedim(dim, -1).unsqueeze(-1)
    values = ((words >> places) & ((1 << bits) - 1)).to(torch.uint8)
    return values.flatten(-2).movedim(-1, dim)
