"""The methods with float8 weights (e4m3), and with inputs in floats or in e4m3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from piecegraph.passes.ops.quantised.e4m3 import dequantised
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import MAX_E4M3, WHOLE_TOKEN
from piecegraph.runner.quantization.methods.linear_method import (
    DEQUANTISED,
    STREAMED,
    DoesNotFit,
    PackedWeight,
    Scheme,
    check_finite,
)
from piecegraph.runner.quantization.methods.shard import Shard


@dataclass(frozen=True, slots=True)
class Fp8:
    """Weights in e4m3 with a scale for each output channel or block; inputs stay floats."""

    name: ClassVar[str] = "fp8"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": DEQUANTISED, "cuda": STREAMED}
    inputs: ClassVar[str] = "floats"

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return e4m3 `[num_columns, size]` and float32 scales `[row blocks, column blocks]`."""
        rows, size = weight.shape
        block = (scheme.block_rows, scheme.group_size)
        shape = (-(-rows // block[0]), -(-size // block[1]) if block[1] else 1)
        values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        return PackedWeight(values=values, scale=weight.new_empty(shape, dtype=torch.float32), block=block)

    def pack(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return e4m3 values and scales `[num_columns, 1]`, the largest magnitude of a channel over 448."""
        assert scheme == Scheme(method=self.name), "weights are quantised by channel"
        wide = weight.float()
        largest = wide.abs().amax(1, keepdim=True)
        check_finite(largest)
        scale = torch.where(largest == 0, 1.0, largest / MAX_E4M3)
        return PackedWeight(values=(wide / scale).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn), scale=scale)

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return the rank's values, and scales for blocks that lie on one rank whole."""
        place = 0 if shard.dim == -2 else 1
        values, scale, block = shard.of(packed.values), packed.scale, list(packed.block)
        if scale.shape[place] == 1 and place == 1:
            return PackedWeight(values=values, scale=scale.clone(), block=packed.block)
        unit = shard.unit(block[place])
        if unit != block[place]:
            if self.inputs == "groups" and place == 1:
                raise DoesNotFit(
                    f"inputs are rounded in groups of {block[1]}, which do not lie on one rank whole: {shard.parts}"
                )
            size = -(-shard.full_size // unit)
            scale = scale.repeat_interleave(block[place] // unit, place).narrow(place, 0, size)
            block[place] = unit
        return PackedWeight(values=values, scale=shard.in_units(unit, shard.dim).of(scale), block=(block[0], block[1]))

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights in float32."""
        return dequantised(packed.values, packed.scale, packed.block, packed.scale.dtype)

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call `piecegraph::fp8_linear`."""
        input_group = {"floats": 0, "tokens": WHOLE_TOKEN, "groups": packed.block[1]}[self.inputs]
        out: torch.Tensor = FP8_LINEAR(x, packed.values, packed.scale, bias, packed.block, input_group, largest)
        return out

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Raise: embeddings have no such checkpoints."""
        raise AssertionError("an embedding is not stored in fp8")


@dataclass(frozen=True, slots=True)
class Fp8Tokens(Fp8):
    """The weights of `Fp8`; inputs are rounded to e4m3 with a scale for each token."""

    name: ClassVar[str] = "fp8-tokens"
    kernels: ClassVar[Mapping[str, str]] = {
        "cpu": DEQUANTISED,
        "cuda": "our Triton kernel over inputs in e4m3, torch._scaled_mm for many rows",
    }
    inputs: ClassVar[str] = "tokens"


@dataclass(frozen=True, slots=True)
class Fp8Groups(Fp8):
    """The weights of `Fp8`; inputs are rounded to e4m3 with a scale for each group of a block's columns."""

    name: ClassVar[str] = "fp8-groups"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": DEQUANTISED, "cuda": "our Triton kernel over inputs in e4m3"}
    inputs: ClassVar[str] = "groups"
