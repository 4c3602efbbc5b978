"""`LinearMethod`, how the weights of a linear layer are stored and applied, and the method of 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from piecegraph.passes.ops.int8_linear import INT8_LINEAR, MAX_PACKED_ROWS, dequantised

MAX_INT8 = 127
"""The largest magnitude of a quantised weight; -128 is not used, so that zero stays zero and signs are alike."""


class NotFinite(ValueError):
    """Weights have an infinite value or a NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight `[num_columns, size]` as a method stores it."""

    values: torch.Tensor
    scale: torch.Tensor


class LinearMethod(Protocol):
    """One way to store the weights of a linear layer or an embedding, and to multiply by them."""

    @property
    def name(self) -> str:
        """The name of the scheme."""

    @property
    def kernel(self) -> str:
        """The kernels that multiply, for `explain`."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return `weight`, `[num_columns, size]`, as new tensors. Works on meta tensors too. Raises `NotFinite`."""

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights that `apply` multiplies by, `[num_columns, size]`, in the dtype of the scale."""

    def apply(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x @ weight.T + bias`, `[..., num_columns]`, in the dtype of `x`, `[..., size]`."""

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return the rows `index` of the weights, `[*index.shape, size]`, in the dtype of the scale."""


@dataclass(frozen=True, slots=True)
class Int8Channels:
    """Weights of 8 bits, symmetric, with one scale for each output channel: the largest magnitude over 127.

    Scales are rounded to bfloat16 before weights are divided by them, so that the rounding is no error of its own.
    """

    name: ClassVar[str] = "int8"
    kernel: ClassVar[str] = f"_weight_int8pack_mm for up to {MAX_PACKED_ROWS} rows, bfloat16 GEMM for more"

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return int8 values and scales `[num_columns]` in the dtype of `weight`."""
        largest = weight.abs().amax(dim=1).float()
        if not weight.is_meta and not bool(largest.isfinite().all()):
            raise NotFinite("it has values that are infinite or not numbers")
        scale = (largest / MAX_INT8).to(torch.bfloat16).float()
        scale = torch.where(scale == 0, 1.0, scale)
        values = (weight / scale[:, None]).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
        return PackedWeight(values=values, scale=scale.to(weight.dtype))

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights, rounded to the dtype of the scale."""
        return dequantised(packed.values, packed.scale, packed.scale.dtype)

    def apply(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Call `piecegraph::int8_linear`."""
        out: torch.Tensor = INT8_LINEAR(x, packed.values, packed.scale, bias)
        return out

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Look up values and scales."""
        values = torch.nn.functional.embedding(index, packed.values).to(packed.scale.dtype)
        return values * packed.scale[index].unsqueeze(-1)


METHODS: dict[str, LinearMethod] = {Int8Channels.name: Int8Channels()}
"""The methods by the name of their scheme."""
