"""The plan of a split graph: what it binds, in which order it runs, and how its values are named."""

from __future__ import annotations

import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.splitting.plan import CallStep, PieceStep
from tests.compiler.toy import HIDDEN


class Reserved(nn.Module):
    """A module whose argument and parameter have names that the stitched source reserves."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_ = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, device: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.pgtoy.triple(device * self.forward_) + 1
        return result


def test_names_that_the_source_reserves_are_replaced() -> None:
    """`device` and `forward` mean something in the stitched source, so no value has these names."""
    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compiler="eager")
    module, x = Reserved(), torch.randn(3, HIDDEN)
    model = pg.compile(module, config, dynamic_dims={"device": 0}, example_inputs=(x,))
    plan = model.plan
    names = [slot.name for slot in (*plan.arguments, *plan.bound)]
    assert len(set(names)) == len(names) and not {"device", "forward", "torch"} & set(names)
    assert [type(step) for step in plan.steps] == [PieceStep, CallStep, PieceStep]
    with torch.no_grad():
        assert torch.equal(model(x), module(x))


def test_calls_of_split_ops_are_described_without_tensors() -> None:
    """A described call has a tensor's shape, with sizes as text where they are dynamic, and no tensor."""
    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compiler="eager")
    model = pg.compile(Reserved(), config, dynamic_dims={"device": 0}, example_inputs=(torch.randn(3, HIDDEN),))
    (call,) = model.split_calls
    (argument,) = call.args
    assert call.op == "pgtoy::triple" and argument.dtype is torch.float32
    assert isinstance(argument.shape[0], str) and argument.shape[1] == HIDDEN
