"""Weights in 8 bits: how far they are from those that were given, and what cannot be quantised."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import NotFinite, Scheme

INT8 = METHODS["int8"]
SCHEME = Scheme(method="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    """The largest of a channel may be off by a further quarter of a step, by the rounding of its scale."""
    weight = torch.randn(33, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = INT8.pack(weight, SCHEME)
    assert (packed.values.dtype, packed.scale.dtype) == (torch.int8, dtype)
    step = packed.scale.double()[:, None]
    assert bool(((packed.values * step - weight.double()).abs() <= 0.76 * step).all())
    assert torch.equal(packed.scale, packed.scale.bfloat16().to(dtype))


def test_rows_are_those_of_the_unpacked_weights() -> None:
    packed = INT8.pack(torch.randn(12, 32), SCHEME)
    index = torch.tensor([[3, 0], [11, 3]])
    assert torch.equal(INT8.rows(packed, index), INT8.unpack(packed)[index])


def test_a_channel_of_zeros_stays_zero() -> None:
    packed = INT8.pack(torch.zeros(2, 16), SCHEME)
    assert not packed.values.any() and bool(packed.scale.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.zeros(2, 16)
    weight[1, 3] = bad
    with pytest.raises(NotFinite):
        INT8.pack(weight, SCHEME)


def test_shapes_of_packed_weights_need_no_values() -> None:
    packed, meta = INT8.pack(torch.ones(4, 16), SCHEME), INT8.empty(torch.ones(4, 16, device="meta"), SCHEME)
    for found, wanted in ((meta.values, packed.values), (meta.scale, packed.scale)):
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
