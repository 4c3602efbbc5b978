"""Weights of 4 bits in words: the same numbers as in bytes, for the weights, ranks and devices that they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.runner.quantization.methods.all_methods import METHODS, fastest
from piecegraph.runner.quantization.methods.linear_method import Scheme
from piecegraph.runner.quantization.methods.shard import Shard

SCHEME = Scheme(method="int4", group_size=32, has_offset=True)
WORDS = METHODS["int4-words"]


def weight(rows: int = 12, size: int = 512) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("has_offset", [True, False])
def test_they_stand_for_the_same_numbers_as_bytes(group: int, has_offset: bool) -> None:
    scheme = replace(SCHEME, group_size=group, has_offset=has_offset)
    plain, packed = (METHODS[method].pack(weight(), scheme) for method in ("int4", "int4-words"))
    assert torch.equal(WORDS.unpack(packed), METHODS["int4"].unpack(plain))
    empty = WORDS.empty(weight().to("meta"), scheme)
    for found, wanted in ((empty.values, packed.values), (empty.scale, packed.scale)):
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    x, bias = torch.randn(3, 512).bfloat16(), torch.randn(12).bfloat16()
    assert torch.equal(WORDS.apply(x, packed, bias), METHODS["int4"].apply(x, plain, bias))


def test_weights_without_offsets_get_some_of_zero() -> None:
    stored = WORDS.stored(torch.full((2, 128), 3, dtype=torch.uint8), torch.ones(2, 1), None, torch.bfloat16)  # type: ignore[attr-defined]
    assert torch.equal(WORDS.unpack(stored), torch.full((2, 128), 3.0, dtype=torch.bfloat16))


def test_they_are_for_linears_in_bfloat16_on_a_gpu_whose_sizes_fit() -> None:
    def chosen(given: torch.Tensor, scheme: Scheme = SCHEME, *, is_linear: bool = True) -> str:
        return fastest(scheme, given, is_linear=is_linear, device_type="cuda").method

    assert chosen(weight()) == "int4-words" == chosen(weight(), replace(SCHEME, group_size=0))
    assert chosen(weight(), is_linear=False) == "int4"
    for other in (weight().float(), weight().half(), weight(size=192)):
        assert chosen(other) == "int4"
    for group in (16, 48, 1024):
        assert chosen(weight(), replace(SCHEME, group_size=group)) == "int4"
    assert chosen(weight(), Scheme(method="int8")) == "int8"
    assert fastest(SCHEME, weight(), is_linear=True, device_type="cpu").method != "int4-words"


@pytest.mark.parametrize("group", [0, 32, 128])
def test_ranks_get_parts_that_fit(group: int) -> None:
    scheme = replace(SCHEME, group_size=group)
    packed = WORDS.pack(weight(), scheme)
    rows = Shard(dim=-2, full_size=12, parts=((3, 7, 5),))
    columns = Shard(dim=-1, full_size=512, parts=((128, 256, 128), (384, 512, 256)))
    for shard in (rows, columns):
        assert fastest(scheme, weight(), is_linear=True, device_type="cuda", shard=shard).method == "int4-words"
        cut = WORDS.unpack(WORDS.cut(packed, shard))
        assert torch.equal(cut, shard.of(WORDS.unpack(packed)))
    other = Shard(dim=-1, full_size=512, parts=((192, 384, 192),))
    assert fastest(scheme, weight(), is_linear=True, device_type="cuda", shard=other).method == "int4"
