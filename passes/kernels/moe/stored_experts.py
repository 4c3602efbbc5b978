"""The operands of experts with quantised weights: how these are stored, and what stands between two products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Stored(NamedTuple):
    """The weights of one projection of all experts, each of which is stored as the weights of a linear are."""

    values: torch.Tensor  # [num_experts, rows, size], with two values of 4 bits in a byte [num_experts, rows, size / 2]
    scale: torch.Tensor  # [num_experts, *scales of one expert]; uint8 with MXFP4
    bias: torch.Tensor | None  # [num_experts, rows]
    block: Sequence[int]  # rows and columns that share a scale of e4m3 weights

    def of(self, expert: int) -> Stored:
        """Return the weights of one expert."""
        bias = None if self.bias is None else self.bias[expert]
        return Stored(self.values[expert], self.scale[expert], bias, self.block)


CLAMPED_SWIGLU = "clamped_swiglu"
"""The gate `(up + 1) * gate * sigmoid(alpha * gate)`, whose `gate` is at most and `up` within `limit`."""


class Gate(NamedTuple):
    """The gate of an expert: the elementwise function between its two products."""

    activation: str  # a name in `act_mul.ACTIVATIONS`, or `CLAMPED_SWIGLU`
    is_interleaved: bool  # whether rows of gate and up alternate; otherwise those of gate are the first half
    alpha: float  # these two are of `CLAMPED_SWIGLU` only
    limit: float
