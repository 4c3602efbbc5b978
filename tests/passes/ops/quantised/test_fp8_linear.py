"""`piecegraph::fp8_linear`: scales by channel and by block, and inputs that are rounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised import e4m3
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, rounded_reference
from tests.passes.kernels.quantised.quantised_inputs import spread


@pytest.mark.parametrize("block", [(1, 0), (1, 16), (16, 16)])
@pytest.mark.parametrize("input_group", [0, WHOLE_TOKEN, 16])
def test_it_multiplies_by_the_dequantised_weights(
    block: tuple[int, int], input_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks are smaller; channels are computed by two blocks at a time."""
    monkeypatch.setattr(e4m3, "ROWS_AT_ONCE", 32)
    rows, size = 70, 40
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(rows, size, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-size // block[1]) if block[1] else 1, generator=generator)
    x, bias = torch.randn(3, size, generator=generator), torch.randn(rows, generator=generator)
    every = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1] or size, 1)[:, :size]
    group = size if input_group == WHOLE_TOKEN else input_group
    near = spread(*rounded_reference(x, group, torch.float8_e4m3fn), group) if group else x
    wanted = F.linear(near.double(), weight.double() * every.double(), bias.double())
    found = FP8_LINEAR(x, weight, scale, bias, block, input_group)
    assert (found.double() - wanted).abs().amax() < 1e-4
