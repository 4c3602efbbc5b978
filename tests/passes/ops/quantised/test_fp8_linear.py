"""`piecegraph::fp8_linear`: every value of e4m3, scales by channel and by block, and inputs that are rounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised import fp8_linear
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR, WHOLE_TOKEN, e4m3_to_bfloat16, rounded_to_e4m3


def test_every_value_is_converted_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[every & 0x7F != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_to_bfloat16(numbers).float(), numbers.float())


@pytest.mark.parametrize("block", [(1, 0), (1, 16), (16, 16)])
@pytest.mark.parametrize("input_group", [0, WHOLE_TOKEN, 16])
def test_it_multiplies_by_the_dequantised_weights(
    block: tuple[int, int], input_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks are smaller; channels are computed by two blocks at a time."""
    monkeypatch.setattr(fp8_linear, "_ROWS_AT_ONCE", 32)
    rows, size = 70, 40
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(rows, size, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-size // block[1]) if block[1] else 1, generator=generator)
    x, bias = torch.randn(3, size, generator=generator), torch.randn(rows, generator=generator)
    every = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1] or size, 1)[:, :size]
    near = rounded_to_e4m3(x, input_group) if input_group else x
    wanted = F.linear(near.double(), weight.double() * every.double(), bias.double())
    found = FP8_LINEAR(x, weight, scale, bias, block, input_group)
    assert (found.double() - wanted).abs().amax() < 1e-4


def test_inputs_are_rounded_by_group() -> None:
    """Within a sixteenth of each value, or of the smallest step of its group; a group of zeros stays zero."""
    x = torch.randn(5, 40) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2] = 0
    for group, per_group in ((WHOLE_TOKEN, 40), (16, 16)):
        near = rounded_to_e4m3(x, group)
        padded = F.pad(x, (0, -40 % per_group)).unflatten(1, (-1, per_group)).abs().amax(-1, keepdim=True)
        largest = padded.expand(-1, -1, per_group).flatten(1)[:, :40]
        assert bool(((near - x).abs() <= x.abs() / 16 + largest / 448 / 512 + 1e-12).all())
        assert not near[2].any()
