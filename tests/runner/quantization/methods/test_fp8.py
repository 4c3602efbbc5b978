"""Weights in e4m3: how far they are from those that were given."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import NotFinite, Scheme

SCHEME = Scheme(method="fp8")
FP8 = METHODS["fp8"]


def test_weights_are_off_by_a_sixteenth_at_most() -> None:
    """Or by half of the smallest step of their channel; a channel of zeros stays zero."""
    weight = torch.randn(33, 48, generator=torch.Generator().manual_seed(0))
    weight[5] = 0
    packed = FP8.pack(weight, SCHEME)
    assert (packed.values.dtype, packed.scale.shape) == (torch.float8_e4m3fn, (33, 1))
    smallest = packed.scale / 512
    assert bool(((FP8.unpack(packed) - weight).abs() <= weight.abs() / 16 + smallest).all())
    assert not FP8.unpack(packed)[5].any()


def test_blocks_count_their_rests() -> None:
    empty = FP8.empty(torch.empty(40, 20, device="meta"), Scheme(method="fp8", block_rows=16, group_size=16))
    assert empty.scale.shape == (3, 2) and empty.block == (16, 16)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NotFinite):
        FP8.pack(torch.full((2, 4), float("inf")), SCHEME)
