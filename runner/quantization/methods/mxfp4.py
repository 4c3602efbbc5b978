"""The method with weights in MXFP4: 4 bits, and a power of two for each 32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from piecegraph.passes.ops.quantised.mxfp4 import dequantised
from piecegraph.runner.quantization.methods.groups import GroupedInt4
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme


@dataclass(frozen=True, slots=True)
class Mxfp4(GroupedInt4):
    """Weights in E2M1, two in a byte, with a scale in E8M0 for each group. Only experts are stored so."""

    name: ClassVar[str] = "mxfp4"
    kernels: ClassVar[Mapping[str, str]] = {}

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return uint8 `[num_columns, size / 2]` and scales uint8 `[num_columns, num_groups]`."""
        packed = GroupedInt4.empty(self, weight, scheme)
        return PackedWeight(values=packed.values, scale=torch.empty_like(packed.scale, dtype=torch.uint8))

    def pack(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Raise: checkpoints alone have such weights."""
        raise AssertionError("weights are not quantised to mxfp4 here")

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights in float32."""
        return dequantised(packed.values, packed.scale, torch.float32)

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raise: no linear is stored so."""
        raise AssertionError("only experts are stored in mxfp4")

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Raise: no embedding is stored so."""
        raise AssertionError("only experts are stored in mxfp4")
