"""`piecegraph::int4_tiles_linear`: its order is that of torch's kernel, and few rows and many give the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised import int4_tiles_linear
from piecegraph.passes.ops.quantised.int4_tiles_linear import (
    INT4_TILES_LINEAR,
    MAX_PACKED_ROWS,
    dequantised,
    from_tiles,
    tile_rows,
    to_tiles,
)

ROWS = tile_rows()


def test_values_come_back_from_tiles() -> None:
    values = torch.randint(0, 16, (128, 24), dtype=torch.uint8)
    for rows in int4_tiles_linear.TILE_ROWS.values():
        assert torch.equal(from_tiles(to_tiles(values, rows), rows), values)


@pytest.mark.skipif(ROWS is None, reason="torch's kernel has no tiles on this machine")
def test_the_order_is_that_of_the_kernel() -> None:
    assert ROWS is not None
    values = torch.randint(0, 16, (2 * ROWS, 64), dtype=torch.int32)
    assert torch.equal(to_tiles(values, ROWS), torch._convert_weight_to_int4pack_for_cpu(values, 1))


@pytest.mark.skipif(ROWS is None, reason="torch's kernel has no tiles on this machine")
@pytest.mark.parametrize("rows", [1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1])
@pytest.mark.parametrize("group", [32, 64])
def test_it_multiplies_by_the_dequantised_weights(rows: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROWS is not None
    monkeypatch.setattr(int4_tiles_linear, "_ROWS_AT_ONCE", ROWS)
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(0, 16, (2 * ROWS, 128), generator=generator, dtype=torch.uint8)
    scale = torch.randn(128 // group, 2 * ROWS, 2, generator=generator).bfloat16()
    x, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 128), (2 * ROWS,)))
    weight = to_tiles(values, ROWS)
    exact = dequantised(weight, scale, torch.float64)
    step, middle = scale.double()[..., 0].t(), scale.double()[..., 1].t()
    by_group = (values.double() - 8).unflatten(1, (-1, group)) * step.unsqueeze(-1) + middle.unsqueeze(-1)
    assert torch.allclose(exact, by_group.flatten(1), rtol=1e-6)
    wanted = F.linear(x.double(), exact, bias.double())
    size = F.linear(x.double().abs(), exact.abs()).amax()
    found = INT4_TILES_LINEAR(x, weight, scale, bias)
    assert found.dtype is torch.bfloat16 and (found.double() - wanted).abs().amax() <= 3 * 2**-9 * size
    rounded = INT4_TILES_LINEAR(x.float(), weight, scale, bias.float())
    assert rounded.dtype is torch.float32 and (rounded.double() - wanted).abs().amax() <= 3 * 2**-9 * size
