"""`Int4Words`: weights of 4 bits in the order that our kernel for GPUs unpacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from piecegraph.passes.kernels.quantised.words import RUN_COLUMNS, WORD_COLUMNS, to_words
from piecegraph.runner.quantization.methods.groups import GroupedInt4
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme, num_groups
from piecegraph.runner.quantization.methods.shard import Shard

IN_WORDS = "our Triton kernel for up to 256 rows, GEMM over weights that are dequantised for more"
"""The kernels for weights of 4 bits in words, as `explain` shows them."""


@dataclass(frozen=True, slots=True)
class Int4Words(GroupedInt4):
    """The weights of `GroupedInt4` in words of 32 bits, always with offsets, for inputs of 16 bits."""

    name: ClassVar[str] = "int4-words"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": IN_WORDS}

    @staticmethod
    def fits(weight: torch.Tensor, scheme: Scheme, shard: Shard | None = None) -> bool:
        """Return whether weights of this shape, dtype and group size can be in words.

        `shard`: the part of the weight that the rank holds, which has to fit too.
        """
        group = scheme.group_size
        if shard is not None and shard.dim == -1:
            unit = max(group, WORD_COLUMNS)
            if shard.unit(unit) != unit:
                return False
        return (
            weight.dtype is torch.bfloat16
            and weight.shape[1] % WORD_COLUMNS == 0
            and (group in (RUN_COLUMNS, 2 * RUN_COLUMNS) or group % WORD_COLUMNS == 0)
            and (not group or weight.shape[1] % group == 0)
        )

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return int32 `[num_columns, size / 8]` and scales `[num_columns, num_groups, 2]` in the dtype of `weight`."""
        rows, size = weight.shape
        values = torch.empty((rows, size // 8), dtype=torch.int32, device=weight.device)
        return PackedWeight(values=values, scale=weight.new_empty((rows, num_groups(size, scheme.group_size), 2)))

    def stored(
        self, values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedWeight:
        """Return what `GroupedInt4.stored` does, in words; without offsets these are 0."""
        together = torch.stack((scale, torch.zeros_like(scale) if offset is None else offset), -1)
        return PackedWeight(values=to_words(values), scale=together.to(dtype))

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return the rank's words and scales, which `fastest` has found to fit."""
        if shard.dim == -2:
            return PackedWeight(values=shard.of(packed.values), scale=shard.in_units(1, -3).of(packed.scale))
        group = shard.full_size // packed.scale.shape[1]
        unit = shard.unit(group)  # all columns may have one scale
        scale = packed.scale.repeat_interleave(group // unit, 1)
        return PackedWeight(values=shard.in_units(8, -1).of(packed.values), scale=shard.in_units(unit, -2).of(scale))

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Raise: embeddings are stored in bytes."""
        raise AssertionError("an embedding is not stored in words")
