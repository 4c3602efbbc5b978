"""Quantised linears that round their input, as a traced graph calls them, over a token of 32 columns."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = (
    torch.randint(-127, 128, (24, 32), generator=_GENERATOR, dtype=torch.int8),
    torch.randn(24, 32, generator=_GENERATOR).to(torch.float8_e4m3fn),
    torch.rand(24, generator=_GENERATOR),
    torch.rand(24, 1, generator=_GENERATOR),
)
"""Weights in int8 and in e4m3, and the scales of their channels."""


def int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = torch.ops.piecegraph.int8_inputs_linear.default(x, weight, scale, None)
    return out


def int8_of_parts(x: Tensor, weight: Tensor, scale: Tensor, largest: Tensor) -> Tensor:
    out: Tensor = torch.ops.piecegraph.int8_inputs_linear.default(x, weight, scale, None, largest)
    return out


def fp8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    out: Tensor = torch.ops.piecegraph.fp8_linear.default(x, weight, scales, None, [1, 0], -1)
    return out


def fp8_groups(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    out: Tensor = torch.ops.piecegraph.fp8_linear.default(x, weight, scales, None, [1, 0], 16)
    return out


def by_int8(x: Tensor, *weights: Any) -> Tensor:
    return int8(x, weights[0], weights[2])


def by_fp8(x: Tensor, *weights: Any) -> Tensor:
    return fp8(x, weights[1], weights[3])


def by_fp8_groups(x: Tensor, *weights: Any) -> Tensor:
    return fp8_groups(x, weights[1], weights[3])


LINEARS = (by_int8, by_fp8, by_fp8_groups)
