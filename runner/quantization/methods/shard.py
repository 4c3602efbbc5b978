"""`Shard`, a rank's part of a tensor: ranges of one dim, padded with zeros to the same size on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Part = tuple[int, int, int]
"""`(start, stop, size)`: the range from `start` to `stop`, followed by zeros up to `size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The ranges of dim `dim` that a rank holds, one after the other. `dim` is negative, as it counts from the end."""

    dim: int
    full_size: int
    parts: tuple[Part, ...]
    step: int = 0  # divides the bounds of the parts of all ranks; 0: only those of `parts` are known

    @property
    def size(self) -> int:
        """The size of the dim on the rank, zeros included: equal on all ranks."""
        return sum(size for _, _, size in self.parts)

    @property
    def num_read(self) -> int:
        """The size of what is read of the full tensor."""
        return sum(stop - start for start, stop, _ in self.parts)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape on the rank of a tensor of `shape`."""
        local = list(shape)
        local[self.dim] = self.size
        return tuple(local)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape on all ranks together of a tensor that has `shape` on the rank."""
        whole = list(shape)
        whole[self.dim] = self.full_size
        return tuple(whole)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a full tensor, a new contiguous tensor."""
        found = []
        for start, stop, size in self.parts:
            found.append(tensor.narrow(self.dim, start, stop - start))
            if size > stop - start:
                shape = list(tensor.shape)
                shape[self.dim] = size - (stop - start)
                found.append(tensor.new_zeros(shape))
        return torch.cat(found, self.dim).contiguous()

    def unit(self, most: int) -> int:
        """Return the largest divisor of `most` that divides all bounds of the ranges, zeros included.

        With `step` it is the same on all ranks, so that they store a quantised weight in groups of one size.
        """
        return math.gcd(most, self.step, *(bound for part in self.parts for bound in part))

    def in_units(self, unit: int, dim: int) -> Shard:
        """Return the same part of a tensor that has one entry for each `unit` in `dim`; `unit` divides all bounds."""
        assert self.unit(unit) == unit, f"{unit} does not divide the bounds of {self.parts}"
        parts = tuple((start // unit, stop // unit, size // unit) for start, stop, size in self.parts)
        return Shard(dim=dim, full_size=-(-self.full_size // unit), parts=parts, step=self.step // unit)
