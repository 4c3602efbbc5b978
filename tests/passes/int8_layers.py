"""Layers over int8 weights, as a function of their tensors and as torch computes them."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph.passes.kernels.cpu.int8_layer import Layer, Linear, Norm
from piecegraph.passes.ops.quantised.int8_linear import dequantised

Tensor = torch.Tensor
SIZE, HIDDEN, INNER, COLUMNS = 24, 48, 80, 36


def linear(num_columns: int, size: int, dtype: torch.dtype, seed: int, *, has_bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (num_columns, size), generator=generator, dtype=torch.int8)
    scale = torch.rand(num_columns, generator=generator) / (70 * size**0.5) + 1e-4
    bias = torch.randn(num_columns, generator=generator).to(dtype) if has_bias else None
    return Linear(weight, scale.to(dtype), bias)


def norm(size: int, dtype: torch.dtype, seed: int, **how: Any) -> Norm:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Norm(weight, eps=1e-5, offset=0.0)._replace(**how)


def layer(dtype: torch.dtype, *, has_bias: bool = False, **how: Any) -> Layer:
    """Return a layer; `how` are changes of its norms."""
    return Layer(
        linear(HIDDEN, SIZE, dtype, 1, has_bias=has_bias),
        norm(HIDDEN, dtype, 2, **how),
        linear(2 * INNER, HIDDEN, dtype, 3, has_bias=has_bias),
        linear(HIDDEN, INNER, dtype, 4, has_bias=has_bias),
        norm(HIDDEN, dtype, 5, **how),
        linear(COLUMNS, HIDDEN, dtype, 6, has_bias=has_bias),
    )


def flat(of: Layer) -> tuple[Any, ...]:
    """Return the arguments of the op behind `x` and `residual`."""
    return tuple(each for part in of for each in part)


def inputs(*rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    x, residual = (torch.randn(*rows, size, generator=generator).to(dtype) for size in (SIZE, HIDDEN))
    return x, residual


def reference(x: Tensor, residual: Tensor, of: Layer) -> tuple[Tensor, Tensor]:
    """Return what a layer computes in float64, with no rounding in between."""

    def multiplied(rows: Tensor, by: Linear) -> Tensor:
        product = rows @ dequantised(by.weight, by.scale, torch.float64).T
        return product if by.bias is None else product + by.bias.double()

    def normed(rows: Tensor, by: Norm) -> Tensor:
        scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + by.eps)
        return scaled if by.weight is None else scaled * (by.weight.double() + by.offset)

    total = multiplied(x.double(), of.out) + residual.double()
    gate, up = multiplied(normed(total, of.norm), of.gate_up).chunk(2, -1)
    result = multiplied(torch.nn.functional.silu(gate) * up, of.down) + total
    return multiplied(normed(result, of.next_norm), of.next), result
