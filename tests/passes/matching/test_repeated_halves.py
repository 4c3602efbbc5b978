"""A table made of a tensor beside itself is made of its repetition; anything else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecegraph.passes.matching.repeated_halves import repeat_halves
from tests.passes.spelled import calls, graph_of, run

Function = Callable[[torch.Tensor], torch.Tensor]

HALVES: dict[str, Function] = {
    "as transformers makes it": lambda x: (torch.cat((x, x), dim=-1).cos() * 1.5).squeeze(0),
    "a positive dim": lambda x: torch.cat([x, x], 2).sin(),
    "cast": lambda x: torch.cat((x, x), -1).sin().to(torch.bfloat16),
}

OTHERS: dict[str, Function] = {
    "two tensors": lambda x: torch.cat((x, x + 1), -1).cos(),
    "three parts": lambda x: torch.cat((x, x, x), -1).cos(),
    "another dim": lambda x: torch.cat((x, x), 1).cos(),
    "no dim": lambda x: torch.cat((x, x)).cos(),
    "a table of two": lambda x: torch.cat((x, x), -1).cos() * x.sum(),
    "no halves": lambda x: x.cos(),
}


def last(function: Function, x: torch.Tensor) -> tuple[torch.fx.Graph, bool]:
    graph = graph_of(function, x)
    output = next(node for node in graph.nodes if node.op == "output")
    found = repeat_halves(graph, output.all_input_nodes[0])
    graph.lint()
    return graph, found


@pytest.mark.parametrize("name", HALVES)
def test_a_concatenation_of_equal_halves_becomes_a_repetition(name: str) -> None:
    x = torch.randn(1, 5, 4)
    graph, found = last(HALVES[name], x)
    assert found and "repeat" in calls(graph) and "cat" not in calls(graph)
    assert torch.equal(run(graph, x), HALVES[name](x))


@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_must_stay_are_not_rewritten(name: str) -> None:
    x = torch.randn(1, 5, 4)
    graph, found = last(OTHERS[name], x)
    assert not found and "repeat" not in calls(graph)
    assert torch.equal(run(graph, x), OTHERS[name](x))
