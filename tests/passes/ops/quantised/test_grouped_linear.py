"""`piecegraph::grouped_linear`: what it computes for 4 and 8 bits, with and without offsets, and its shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.passes.ops.quantised import grouped_linear
from piecegraph.passes.ops.quantised.grouped_linear import GROUPED_LINEAR, nibbles


def by_hand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weights in float64, one number after another."""
    rows, groups = scale.shape[:2]
    size = weight.shape[1] * (2 if weight.dtype is torch.uint8 else 1)
    found = torch.empty(rows, size, dtype=torch.float64)
    for row in range(rows):
        for column in range(size):
            if weight.dtype is torch.uint8:
                byte = int(weight[row, column // 2])
                value = byte >> 4 if column % 2 else byte & 15
            else:
                value = int(weight[row, column])
            numbers = scale[row, column * groups // size].double().reshape(-1)
            found[row, column] = value * numbers[0] + (numbers[1] if len(numbers) == 2 else 0)
    return found


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_multiplies_by_the_dequantised_weights(
    bits: int, has_offsets: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded once, and so are sums; parts of the channels are computed one after another."""
    monkeypatch.setattr(grouped_linear, "_ROWS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randint(0, 256, (10, 32 * bits // 8), generator=generator, dtype=torch.uint8)
    weight = weight if bits == 4 else weight.view(torch.int8)
    scale = torch.rand((10, 4, 2) if has_offsets else (10, 4), generator=generator).to(dtype)
    x, bias = torch.randn(2, 3, 32, generator=generator).to(dtype), torch.randn(10, generator=generator).to(dtype)
    exact = by_hand(weight, scale)
    for given in (None, bias):
        found = GROUPED_LINEAR(x, weight, scale, given)
        wanted = F.linear(x.double(), exact, None if given is None else given.double())
        size = F.linear(x.double().abs(), exact.abs()).amax() + bias.abs().amax()
        assert found.dtype is dtype and found.shape == (2, 3, 10)
        assert (found.double() - wanted).abs().amax() <= 3 * torch.finfo(dtype).eps * size
    with FakeTensorMode() as mode:
        fake = GROUPED_LINEAR(*(mode.from_tensor(each) for each in (x, weight, scale, bias)))
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


def test_the_low_bits_come_first() -> None:
    assert nibbles(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist() == [[1, 2, 0, 15]]
