"""MXFP4 as a rank has it: its part stands for the same numbers, also where it has a part of a group."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.quantization.methods.linear_method import DoesNotFit, PackedWeight, Scheme
from piecegraph.runner.quantization.methods.mxfp4 import Mxfp4
from piecegraph.runner.quantization.methods.shard import Shard


@pytest.mark.parametrize(
    "shard",
    [
        Shard(dim=-2, full_size=6, parts=((2, 4, 2), (5, 6, 2))),
        Shard(dim=-1, full_size=96, parts=((32, 64, 32),)),
        Shard(dim=-1, full_size=96, parts=((48, 96, 64),)),
    ],
)
def test_a_part_stands_for_the_same_numbers(shard: Shard) -> None:
    """Rows, whole groups, and half a group with zeros behind it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (6, 48), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 130, (6, 3), generator=generator, dtype=torch.uint8)
    packed, method = PackedWeight(values=values, scale=scale), Mxfp4()
    assert torch.equal(method.unpack(method.cut(packed, shard)), shard.of(method.unpack(packed)))


def test_its_shapes_are_those_of_blocks() -> None:
    scheme = Scheme(method="mxfp4", group_size=32)
    packed = Mxfp4().empty(torch.empty(6, 96), scheme)
    assert (packed.values.shape, packed.scale.shape) == ((6, 48), (6, 3))
    assert packed.values.dtype is packed.scale.dtype is torch.uint8
    with pytest.raises(DoesNotFit, match="groups of 32 do not divide its 80 columns"):
        Mxfp4().empty(torch.empty(6, 80), scheme)
