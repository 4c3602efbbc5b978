"""A rank's part of a tensor, and of a weight as each method stores it: it stands for the same numbers."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.quantised.int4_tiles_linear import tile_rows
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.fp8 import Fp8, Fp8Groups
from piecegraph.runner.quantization.methods.groups import Int4Tiles
from piecegraph.runner.quantization.methods.linear_method import DoesNotFit, PackedWeight, Scheme
from piecegraph.runner.quantization.methods.shard import Shard

ROWS, SIZE = 128, 192
SCHEMES = {
    "int8": Scheme(method="int8"),
    "int8-inputs": Scheme(method="int8-inputs"),
    "int8-groups": Scheme(method="int8-groups", group_size=32),
    "int8-groups of whole channels": Scheme(method="int8-groups", has_offset=True),
    "int4": Scheme(method="int4", group_size=64, has_offset=True),
    "fp8": Scheme(method="fp8"),
    "fp8-tokens": Scheme(method="fp8-tokens"),
}
PARTS = {
    "the second half": ((0.5, 1.0, 0.5),),
    "a third that cuts groups": ((0.25, 0.5, 0.25),),
    "two parts and zeros": ((0.0, 0.25, 0.25), (0.75, 0.875, 0.25)),
}


def shards(name: str) -> list[Shard]:
    """The part in each dim."""
    return [
        Shard(
            dim=dim,
            full_size=size,
            parts=tuple((int(start * size), int(stop * size), int(held * size)) for start, stop, held in PARTS[name]),
        )
        for dim, size in ((-2, ROWS), (-1, SIZE))
    ]


def weight() -> torch.Tensor:
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_part_of_a_weight_stands_for_the_same_numbers(name: str, part: str) -> None:
    method = METHODS[SCHEMES[name].method]
    scheme = SCHEMES[name]
    if method.name == "fp8-tokens":  # of files only; the weights are those of fp8
        packed = Fp8().pack(weight(), Scheme(method="fp8"))
    else:
        packed = method.pack(weight(), scheme)
    for shard in shards(part):
        torch.testing.assert_close(
            method.unpack(method.cut(packed, shard)), shard.of(method.unpack(packed)), rtol=0, atol=0
        )


@pytest.mark.parametrize("part", PARTS)
def test_blocks_that_ranks_share_become_smaller(part: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, SIZE, generator=generator).to(torch.float8_e4m3fn)
    packed = PackedWeight(values=values, scale=torch.rand(2, 2, generator=generator), block=(64, 128))
    for shard in shards(part):
        method = Fp8()
        torch.testing.assert_close(
            method.unpack(method.cut(packed, shard)), shard.of(method.unpack(packed)), rtol=0, atol=0
        )


def test_what_cannot_be_cut_says_why() -> None:
    values = torch.zeros(ROWS, SIZE, dtype=torch.float8_e4m3fn)
    packed = PackedWeight(values=values, scale=torch.ones(2, 2), block=(64, 128))
    with pytest.raises(DoesNotFit, match="inputs are rounded in groups of 128, which do not lie on one rank whole"):
        Fp8Groups().cut(packed, Shard(dim=-1, full_size=SIZE, parts=((0, 96, 96),)))
    int4 = METHODS["int4"]
    with pytest.raises(DoesNotFit, match="a byte has 2 values of its input"):
        int4.cut(int4.pack(weight(), SCHEMES["int4"]), Shard(dim=-1, full_size=SIZE, parts=((0, 65, 65),)))


@pytest.mark.skipif(tile_rows() is None, reason="torch's kernel has no tiles on this machine")
def test_tiles_are_cut_where_the_part_fits() -> None:
    method, scheme = METHODS["int4-tiles"], Scheme(method="int4-tiles", group_size=32, has_offset=True)
    packed = method.pack(weight().bfloat16(), scheme)
    for shard in shards("the second half"):
        assert Int4Tiles.fits(weight().bfloat16(), scheme, shard)
        torch.testing.assert_close(
            method.unpack(method.cut(packed, shard)), shard.of(method.unpack(packed)), rtol=0, atol=0
        )
    for shard in shards("a third that cuts groups"):
        is_whole = shard.dim == -2 and tile_rows() == 32  # its 32 rows; tiles of AVX-512 have 64
        assert Int4Tiles.fits(weight().bfloat16(), scheme, shard) == is_whole
