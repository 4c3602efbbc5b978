"""Numbers in float8 (e4m3) as floats, and products with weights that become floats part by part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

ROWS_AT_ONCE = 2048
"""The rows of weights that are floats at one time, so that a large matrix has no float copy."""


def times_dequantised(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """Return `x @ (weight * scale).T`, `[num_tokens, num_columns]`; weights times scales are rounded to `x`'s dtype."""
    num_columns = weight.shape[0]
    out = x.new_empty((x.shape[0], num_columns))
    at_once = max(ROWS_AT_ONCE // block[0], 1) * block[0]
    for first in range(0, num_columns, at_once):
        part = slice(first, min(first + at_once, num_columns))
        blocks = slice(first // block[0], -(-part.stop // block[0]))
        out[:, part] = F.linear(x, dequantised(weight[part], scale[blocks], block, x.dtype))
    return out


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the weights `[num_columns, size]` that the ops multiply by, as `dtype`."""
    num_columns, size = weight.shape
    factor = scale.float()
    if block[0] > 1:
        factor = factor.repeat_interleave(block[0], 0)[:num_columns]
    if scale.shape[1] > 1:
        factor = factor.repeat_interleave(block[1], 1)[:, :size]
    return (e4m3_to_bfloat16(weight).float() * factor).to(dtype)


def e4m3_to_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """Return the same values in bfloat16; no value is NaN.

    The bits are moved to their places and the exponent's bias is corrected by a product, which is exact for subnormal
    values too. Torch converts e4m3 on a CPU one value at a time, ten times as slowly.
    """
    bits = weight.view(torch.int8).to(torch.int16)  # the sign is extended to the high bits
    moved = ((bits << 4) & 0x07F0) | (bits & -0x8000)
    return moved.view(torch.bfloat16) * 2.0**120
