"""`piecegraph::linear` on a CPU, and what a graph knows of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.linear import LINEAR


@pytest.mark.parametrize("bias", [True, False])
def test_without_an_activation_it_is_torchs_linear(bias: bool) -> None:
    layer = torch.nn.Linear(8, 6, bias=bias)
    x = torch.randn(2, 3, 8)
    assert torch.equal(LINEAR(x, layer.weight, layer.bias, ""), layer(x))


def test_an_activation_joins_the_halves() -> None:
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    gate, up = F.linear(x, weight).chunk(2, -1)
    torch.testing.assert_close(LINEAR(x, weight, None, "silu"), F.silu(gate) * up)


def test_its_shape_is_known_without_running_it() -> None:
    torch.library.opcheck(LINEAR, (torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(12), "gelu"))
    torch.library.opcheck(LINEAR, (torch.randn(5, 8), torch.randn(12, 8), None, ""))
