"""`piecegraph::int8_inputs_linear`: exact sums of the rounded inputs, for any sizes."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.quantised.int8_inputs_linear import INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows


@pytest.mark.parametrize("rows", [1, 3, 17, 40])
@pytest.mark.parametrize("shape", [(7, 32), (5, 20), (3, 33), (130, 576)])
def test_sums_are_exact(rows: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, shape[1], generator=generator), torch.randn(shape[0], generator=generator)
    weight = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand(shape[0], generator=generator)
    values, step = round_rows(x, WHOLE_TOKEN, torch.int8)
    wanted = values.double() @ weight.double().t() * step.double() * scale.double() + bias.double()
    found = INT8_INPUTS_LINEAR(x, weight, scale, bias)
    assert (found.double() - wanted).abs().amax() <= 4 * torch.finfo(torch.float32).eps * wanted.abs().amax()
