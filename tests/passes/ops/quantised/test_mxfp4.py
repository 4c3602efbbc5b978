"""MXFP4 as floats: by the specification's formulas, and as transformers does it."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from piecegraph.passes.ops.quantised.mxfp4 import dequantised


def by_the_specification(code: int, scale: int) -> float:
    """Return S EE M with a bias of 1, subnormal where E is 0, times a power of two with a bias of 127."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return (-1) ** sign * value * 2.0 ** (scale - 127)


def test_every_code_and_scale_is_what_the_specification_says() -> None:
    bytes_of_all = torch.tensor([low | (15 - low) << 4 for low in range(16)], dtype=torch.uint8)  # 32 values
    scales = torch.tensor([[each] for each in range(2, 252)], dtype=torch.uint8)
    found = dequantised(bytes_of_all.expand(len(scales), 16), scales, torch.float32)
    for row, (scale,) in zip(found.tolist(), scales.tolist(), strict=True):
        assert row == [by_the_specification(code, scale) for low in range(16) for code in (low, 15 - low)]


def test_it_equals_what_transformers_makes_of_the_same_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)  # [num_experts, size, rows]
    assert torch.equal(dequantised(blocks.flatten(2), scales, torch.bfloat16), theirs.transpose(1, 2))
