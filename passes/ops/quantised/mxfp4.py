"""Weights in MXFP4, of the Open Compute Project's Microscaling Formats (MX) specification 1.0: as floats again.

32 values of 4 bits (E2M1: a sign, two bits of exponent, one of mantissa) share a scale (E8M0), a power of two.
"""

from __future__ import annotations

import torch

from piecegraph.passes.ops.quantised.grouped_linear import nibbles

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes."""

E8M0_BIAS = 127
"""A stored scale `s` is the factor `2 ** (s - 127)`; 255 is no number."""


def dequantised(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights `[..., size]` as `dtype`.

    `packed` is uint8 `[..., size / 2]`, of each two neighbouring values the first in the low bits; `scale` uint8
    `[..., num_groups]`. Exact in bfloat16 and float32, where the result is a normal number.
    """
    codes = nibbles(packed).unflatten(-1, (scale.shape[-1], -1))
    exponents = (scale.to(torch.int32) - E8M0_BIAS).unsqueeze(-1)
    values = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)[codes.int()]
    floats: torch.Tensor = torch.ldexp(values, exponents).flatten(-2).to(dtype)
    return floats
