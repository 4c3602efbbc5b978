"""Numbers in e4m3 as floats: every value."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.quantised.e4m3 import e4m3_to_bfloat16


def test_every_value_is_converted_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[every & 0x7F != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_to_bfloat16(numbers).float(), numbers.float())
