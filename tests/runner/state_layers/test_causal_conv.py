"""A convolution over tokens continues from its last inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.runner.state_layers.causal_conv import causal_conv


@pytest.mark.parametrize("activation", [None, "silu"])
def test_parts_give_what_the_whole_gives(activation: str | None) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 11, 6), torch.randn(6, 4), torch.randn(6)
    whole = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight.unsqueeze(1), bias, groups=6).transpose(1, 2)
    whole = whole if activation is None else F.silu(whole)
    state, parts = torch.zeros(2, 6, 3), []
    for start, end in ((0, 1), (1, 2), (2, 7), (7, 11)):
        part, state = causal_conv(x[:, start:end], state, weight, bias, activation)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, x[:, -3:].transpose(1, 2))
