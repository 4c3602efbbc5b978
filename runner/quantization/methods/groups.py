"""The methods with a scale for each group of weights, and perhaps an offset: integers of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from piecegraph.passes.ops.quantised import int4_tiles_linear
from piecegraph.passes.ops.quantised.grouped_linear import GROUPED_LINEAR, dequantised
from piecegraph.runner.quantization.methods.linear_method import (
    DEQUANTISED,
    STREAMED,
    STREAMED_PACKED,
    DoesNotFit,
    PackedWeight,
    Scheme,
    check_finite,
    num_groups,
    row_parts,
)
from piecegraph.runner.quantization.methods.shard import Shard


@dataclass(frozen=True, slots=True)
class GroupedInt8:
    """Weights of 8 bits with a scale, and perhaps an offset, for each group."""

    name: ClassVar[str] = "int8-groups"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": DEQUANTISED, "cuda": STREAMED}
    bits: ClassVar[int] = 8
    inputs: ClassVar[str] = "floats"

    def scale_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype of scales and offsets: that of `weight`."""
        return weight.dtype

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return the values as `grouped_linear` takes them, and scales in the dtype of `weight`."""
        rows, size = weight.shape
        groups = num_groups(size, scheme.group_size)
        if self.bits == 4 and size % 2:
            raise DoesNotFit(f"its {size} columns are not even")
        shape = (rows, size) if self.bits == 8 else (rows, size // 2)
        values = torch.empty(shape, dtype=torch.int8 if self.bits == 8 else torch.uint8, device=weight.device)
        scale = weight.new_empty((rows, groups, 2) if scheme.has_offset else (rows, groups))
        return PackedWeight(values=values, scale=scale)

    def pack(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return `weight` rounded to the nearest step between the smallest and the largest value of each group.

        Scales and offsets are rounded to the dtype that they are stored in first, so that this is no error of its own.
        """
        dtype = self.scale_dtype(weight)
        check_finite(weight)
        num = num_groups(weight.shape[1], scheme.group_size)
        values = torch.empty_like(weight, dtype=torch.uint8)
        step, low = (weight.new_empty((weight.shape[0], num), dtype=torch.float32) for _ in range(2))
        for part in row_parts(weight):
            groups = weight[part].unflatten(1, (num, -1)).float()
            least, most = groups.amin(-1), groups.amax(-1)
            rounded = ((most - least) / (2**self.bits - 1)).to(dtype).float()
            step[part] = rounded = torch.where(rounded == 0, 1.0, rounded)
            low[part] = least = least.to(dtype).float()
            steps = (groups - least.unsqueeze(-1)).div_(rounded.unsqueeze(-1)).round_()
            values[part] = steps.clamp_(0, 2**self.bits - 1).flatten(1)
        return self.stored(values, step, low, dtype)

    def stored(
        self, values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedWeight:
        """Return unpacked values `[num_columns, size]` with the scales and offsets of their groups as they are stored.

        Values are from 0 to 15 for 4 bits; for 8 bits int8, or uint8, which is stored as int8 with another offset.
        """
        if self.bits == 4:
            values = values.to(torch.uint8)
            values = values[:, ::2] | (values[:, 1::2] << 4)
        elif values.dtype is torch.uint8:
            values = (values.to(torch.int16) - 128).to(torch.int8)
            offset = 128 * scale + (0 if offset is None else offset)
        together = scale if offset is None else torch.stack((scale, offset), -1)
        return PackedWeight(values=values.contiguous(), scale=together.to(dtype))

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return the rank's values and scales; a group of which a rank has a part becomes several smaller ones."""
        if shard.dim == -2:
            scale = shard.in_units(1, -packed.scale.ndim).of(packed.scale)
            return PackedWeight(values=shard.of(packed.values), scale=scale)
        per_byte = 8 // self.bits
        if shard.unit(per_byte) != per_byte:
            raise DoesNotFit(f"a byte has {per_byte} values of its input, and a rank's part is {shard.parts}")
        group = shard.full_size // packed.scale.shape[1]
        unit = shard.unit(group)
        scale = packed.scale.repeat_interleave(group // unit, 1)
        values = shard.in_units(per_byte, -1).of(packed.values)
        return PackedWeight(values=values, scale=shard.in_units(unit, 1 - scale.ndim).of(scale))

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights, rounded to the dtype of the scale."""
        return dequantised(packed.values, packed.scale, packed.scale.dtype)

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call `piecegraph::grouped_linear`."""
        out: torch.Tensor = GROUPED_LINEAR(x, packed.values, packed.scale, bias)
        return out

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Look up values and scales."""
        return dequantised(packed.values[index], packed.scale[index], packed.scale.dtype)


@dataclass(frozen=True, slots=True)
class GroupedInt4(GroupedInt8):
    """Weights of 4 bits, two in a byte, with a scale and perhaps an offset for each group."""

    name: ClassVar[str] = "int4"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": DEQUANTISED, "cuda": STREAMED_PACKED}
    bits: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class Int4Tiles(GroupedInt4):
    """The weights of `GroupedInt4` in the order that torch's kernel for this CPU reads, for bfloat16 inputs.

    Float32 inputs are rounded, for schemes that say so (`Scheme.may_round`).
    """

    name: ClassVar[str] = "int4-tiles"
    kernels: ClassVar[Mapping[str, str]] = {
        "cpu": f"_weight_int4pack_mm_for_cpu for up to {int4_tiles_linear.MAX_PACKED_ROWS} rows, bfloat16 GEMM for more"
    }

    @staticmethod
    def fits(weight: torch.Tensor, scheme: Scheme, shard: Shard | None = None) -> bool:
        """Return whether the kernel of this machine takes weights of this shape, dtype and group size.

        `shard`: the part of the weight that the rank holds, which has to fit too.
        """
        rows, group = int4_tiles_linear.tile_rows(), scheme.group_size
        if shard is not None and (
            shard.size % (rows or 1) if shard.dim == -2 else not group or shard.unit(group) != group
        ):
            return False
        return (
            rows is not None
            and (weight.dtype is torch.bfloat16 or (weight.dtype is torch.float32 and scheme.may_round))
            and weight.shape[0] % rows == 0
            and group in int4_tiles_linear.GROUP_SIZES
            and weight.shape[1] % group == 0
        )

    def scale_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return bfloat16, which the kernel takes."""
        return torch.bfloat16

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return uint8 `[num_columns, size / 2]` and scales `[num_groups, num_columns, 2]`."""
        rows, size = weight.shape
        values = torch.empty((rows, size // 2), dtype=torch.uint8, device=weight.device)
        shape = (num_groups(size, scheme.group_size), rows, 2)
        return PackedWeight(values=values, scale=weight.new_empty(shape, dtype=torch.bfloat16))

    def stored(
        self, values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedWeight:
        """Return what `GroupedInt4.stored` does, in tiles; the second number of a group is the weight of value 8."""
        rows = int4_tiles_linear.tile_rows()
        assert rows is not None, "this machine's kernel has no tiles"
        middle = 8 * scale + (0 if offset is None else offset)
        together = torch.stack((scale, middle), -1).transpose(0, 1).to(dtype).contiguous()
        return PackedWeight(values=int4_tiles_linear.to_tiles(values.to(torch.uint8), rows), scale=together)

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return the rank's part in tiles of its own, which `fastest` has found to fit."""
        rows = int4_tiles_linear.tile_rows()
        assert rows is not None, "this machine's kernel has no tiles"
        values = shard.of(int4_tiles_linear.from_tiles(packed.values, rows))
        if shard.dim == -2:
            scale = shard.of(packed.scale)
        else:
            scale = shard.in_units(shard.full_size // packed.scale.shape[0], -3).of(packed.scale)
        return PackedWeight(values=int4_tiles_linear.to_tiles(values, rows), scale=scale)

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights, rounded to the dtype of the scale."""
        return int4_tiles_linear.dequantised(packed.values, packed.scale, packed.scale.dtype)

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call `piecegraph::int4_tiles_linear`."""
        out: torch.Tensor = int4_tiles_linear.INT4_TILES_LINEAR(x, packed.values, packed.scale, bias)
        return out

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Raise: embeddings are stored in rows."""
        raise AssertionError("an embedding is not stored in tiles")
