"""The methods with one scale for each output channel: int8 weights, with inputs in floats or in int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.passes.ops.quantised.int8_inputs_linear import INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR, MAX_PACKED_ROWS, dequantised
from piecegraph.runner.quantization.methods.linear_method import STREAMED, PackedWeight, Scheme, check_finite, row_parts
from piecegraph.runner.quantization.methods.shard import Shard

MAX_INT8 = 127
"""The largest magnitude of a quantised weight; -128 is not used, so that zero stays zero and signs are alike."""


@dataclass(frozen=True, slots=True)
class Int8Channels:
    """Weights of 8 bits, symmetric, with one scale for each output channel: the largest magnitude over 127.

    Scales are rounded to bfloat16 before weights are divided by them, so that the rounding is no error of its own.
    """

    name: ClassVar[str] = "int8"
    inputs: ClassVar[str] = "floats"

    @property
    def kernels(self) -> Mapping[str, str]:
        """Our kernel on a CPU once this process has loaded it, else torch's, with the reason."""
        why_not = int8_rows.KERNEL.why_not
        few = (
            f"_weight_int8pack_mm for up to {MAX_PACKED_ROWS} rows (not by our C++ kernel: {why_not})"
            if why_not
            else f"our C++ kernel for float32, and for up to {int8_rows.MAX_BFLOAT16_ROWS} rows of bfloat16"
        )
        return {"cpu": f"{few}, bfloat16 GEMM for more", "cuda": STREAMED}

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return int8 `[num_columns, size]` and scales `[num_columns]` in the dtype of `weight`."""
        return PackedWeight(values=torch.empty_like(weight, dtype=torch.int8), scale=weight.new_empty(weight.shape[0]))

    def pack(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return int8 values and scales `[num_columns]` in the dtype of `weight`."""
        largest = torch.linalg.vector_norm(weight, float("inf"), dim=1).float()  # no copy of the weight's magnitudes
        check_finite(largest)
        scale = (largest / MAX_INT8).to(torch.bfloat16).float()
        scale = torch.where(scale == 0, 1.0, scale)
        values = torch.empty_like(weight, dtype=torch.int8)
        for part in row_parts(weight):
            values[part] = (weight[part] / scale[part, None]).round_().clamp_(-MAX_INT8, MAX_INT8)
        return PackedWeight(values=values, scale=scale.to(weight.dtype))

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return the rank's values; a part of the input has the scales of whole channels."""
        scale = shard.in_units(1, -1).of(packed.scale) if shard.dim == -2 else packed.scale.clone()
        return PackedWeight(values=shard.of(packed.values), scale=scale)

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights, rounded to the dtype of the scale."""
        return dequantised(packed.values, packed.scale, packed.scale.dtype)

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call `piecegraph::int8_linear`."""
        out: torch.Tensor = INT8_LINEAR(x, packed.values, packed.scale, bias)
        return out

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Look up values and scales."""
        values = torch.nn.functional.embedding(index, packed.values).to(packed.scale.dtype)
        return values * packed.scale[index].unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class Int8Inputs(Int8Channels):
    """The weights of `Int8Channels`, multiplied by inputs that are rounded to int8 too, a scale for each token."""

    name: ClassVar[str] = "int8-inputs"
    inputs: ClassVar[str] = "tokens"

    @property
    def kernels(self) -> Mapping[str, str]:
        """The kernels over inputs in int8."""
        return {"cpu": "_int_mm over inputs in int8", "cuda": "our Triton kernel over inputs in int8"}

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call `piecegraph::int8_inputs_linear`."""
        out: torch.Tensor = INT8_INPUTS_LINEAR(x, packed.values, packed.scale, bias, largest)
        return out
