"""`piecegraph::int8_linear`: what it computes for any sizes, and its shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR, MAX_PACKED_ROWS, dequantised

ROWS = (1, 3, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 40)
WEIGHTS = [(7, 32), (64, 48), (5, 20), (64, 33), (3, 8), (130, 576)]
"""Columns and size; torch's kernel would read beyond the weights of sizes that 16 does not divide."""


def inputs(rows: int, columns: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * columns + size)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    weight = torch.randint(-127, 128, (columns, size), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(columns, generator=generator) / 64, torch.randn(columns, generator=generator)
    return x, weight, scale.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.parametrize("rows", ROWS)
def test_it_multiplies_by_the_dequantised_weights(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Within three roundings to bfloat16: of the sum, of its product with the scale, and of that with the bias."""
    x, weight, scale, bias = inputs(rows, *shape, dtype)
    reference = dequantised(weight, scale, torch.float64)
    for given in (None, bias):
        wanted = F.linear(x.bfloat16().double(), reference, None if given is None else given.double())
        size = F.linear(x.double().abs(), reference.abs()).amax()
        found = INT8_LINEAR(x, weight, scale, given)
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found.double() - wanted).abs().amax() <= 3 * 2**-9 * (size + bias.abs().amax())


def test_other_dims_of_x_stay() -> None:
    x, weight, scale, bias = inputs(6, 7, 32, torch.bfloat16)
    folded = x.view(1, 2, 3, 32)
    found = INT8_LINEAR(folded, weight, scale, bias)
    assert torch.equal(found, INT8_LINEAR(x, weight, scale, bias).view(1, 2, 3, 7))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (folded, weight, scale, bias)]
        fake = INT8_LINEAR(*fakes)
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())
