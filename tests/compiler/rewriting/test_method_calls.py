"""Calls of a tensor's methods look the same to passes and to Inductor's cache, whatever Dynamo wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

import piecegraph as pg
from piecegraph.compiler.rewriting.method_calls import name_methods


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (x + 1).split([3, 3], dim=-1)
        return torch.relu(one) * other


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


def test_a_method_that_is_called_as_a_function_is_called_as_a_method() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(torch.Tensor.split, (x, [1, 2]), {"dim": 0})
    relu = graph.call_function(torch.relu, (x,))
    assert name_methods(graph) == 1
    assert (split.op, split.target, split.kwargs) == ("call_method", "split", {"dim": 0})
    assert (relu.op, relu.target) == ("call_function", torch.relu)
    assert name_methods(graph) == 0


def test_a_default_device_changes_no_spelling(default_device: None) -> None:
    """Under one, Dynamo writes `x.split(...)` as a call of `torch.Tensor.split`."""
    config = pg.CompileConfig(compiler="eager", passes=(), cache=False)
    x = torch.randn(2, 6)
    model = pg.compile(Halves(), config, example_inputs=(x,))
    nodes = [node for piece in model.unique_pieces for node in piece.graph_module.graph.nodes]
    assert ("call_method", "split") in [(node.op, node.target) for node in nodes]
    assert torch.equal(model(x), Halves()(x))
