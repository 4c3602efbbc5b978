"""Weights in groups: how far they are from those that were given, and what is stored in tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.passes.ops.quantised.int4_tiles_linear import tile_rows
from piecegraph.runner.quantization.methods.all_methods import METHODS, fastest
from piecegraph.runner.quantization.methods.linear_method import DoesNotFit, NotFinite, Scheme

SCHEMES = [Scheme(method=method, group_size=32, has_offset=True) for method in ("int4", "int8-groups")]
TILES = replace(SCHEMES[0], method="int4-tiles")


def weights(rows: int = 64, size: int = 96) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_weight_is_off_by_more_than_half_a_step(scheme: Scheme) -> None:
    weight = weights()
    packed = METHODS[scheme.method].pack(weight, scheme)
    step = packed.scale[..., 0].repeat_interleave(32, 1)
    difference = (METHODS[scheme.method].unpack(packed) - weight).abs()
    assert bool((difference <= 0.501 * step + 1e-5).all())


@pytest.mark.parametrize("scheme", [*SCHEMES, TILES])
def test_shapes_and_rows(scheme: Scheme) -> None:
    if scheme is TILES and tile_rows() is None:
        pytest.skip("torch's kernel has no tiles on this machine")
    method = METHODS[scheme.method]
    weight = weights().bfloat16()
    packed, empty = method.pack(weight, scheme), method.empty(weight.to("meta"), scheme)
    for found, wanted in ((empty.values, packed.values), (empty.scale, packed.scale)):
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    if scheme is TILES:
        plain = METHODS["int4"]
        same = plain.unpack(plain.pack(weight, SCHEMES[0])).float()
        assert (method.unpack(packed).float() - same).abs().amax() < 2**-7 * same.abs().amax()
    else:
        index = torch.tensor([[3, 0], [11, 3]])
        assert torch.equal(method.rows(packed, index), method.unpack(packed)[index])


def test_tiles_are_for_linears_in_bfloat16_whose_sizes_fit() -> None:
    weight, scheme = weights().bfloat16(), SCHEMES[0]
    fits = tile_rows() is not None
    assert fastest(scheme, weight, is_linear=True, device_type="cpu") == (TILES if fits else scheme)
    for other in (weight.float(), weight[:50]):
        assert fastest(scheme, other, is_linear=True, device_type="cpu") == scheme
    assert fastest(scheme, weight, is_linear=False, device_type="cpu") == scheme
    assert fastest(scheme, weight, is_linear=True, device_type="cuda") == scheme
    rounding = replace(scheme, may_round=True)
    found = fastest(rounding, weight.float(), is_linear=True, device_type="cpu")
    assert found == (replace(TILES, may_round=True) if fits else rounding)
    assert fastest(replace(scheme, group_size=48), weight, is_linear=True, device_type="cpu").method == "int4"


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="groups of 32 do not divide its 40 columns"):
        METHODS["int4"].pack(weights(size=40), SCHEMES[0])
    weight = weights()
    weight[3, 4] = float("nan")
    with pytest.raises(NotFinite):
        METHODS["int4"].pack(weight, SCHEMES[0])


def test_unsigned_values_of_8_bits_become_signed() -> None:
    """The zero point moves into the offset, before that is rounded."""
    values = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    scale, zero = torch.rand(4, 1) + 0.1, torch.full((4, 1), 130.0)
    method = METHODS["int8-groups"]
    packed = method.stored(values, scale, -zero * scale, torch.float32)  # type: ignore[attr-defined]
    assert packed.values.dtype is torch.int8
    assert torch.allclose(method.unpack(packed), (values.float() - zero) * scale, atol=1e-4)
