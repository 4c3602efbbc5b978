"""Linears over one input become one; which, is read off the graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

from piecegraph.passes.merge_projections import MergeProjections
from tests.passes.pass_context import FakeContext


class Projections(nn.Module):
    """Three linears over `x` before a barrier, one after it, and one over something else."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in (6, 4, 2, 6))

    def graph(self) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        weights = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            for name, tensor in layer.named_parameters():
                node = graph.placeholder(f"{name}_{i}")
                node.meta["example_value"] = tensor
                weights.append(node)
        each = len(weights) // len(self.layers)
        own = [tuple(weights[i * each : (i + 1) * each]) for i in range(len(self.layers))]
        outs = [graph.call_function(F.linear, (x, *own[i])) for i in range(3)]
        barrier = graph.call_function(torch.relu, (outs[0],))
        outs.append(graph.call_function(F.linear, (x, *own[3])))
        graph.output((*outs, barrier))
        return graph


def is_barrier(node: fx.Node) -> bool:
    return node.target is torch.relu


def run(graph: fx.Graph, x: torch.Tensor) -> list[torch.Tensor]:
    inputs = [node.meta.get("example_value", x) for node in graph.nodes if node.op == "placeholder"]
    return list(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs))


def merge(graph: fx.Graph) -> list[tuple[str, ...]]:
    """The groups of tensors stored together, by their names."""
    context = FakeContext(graph, is_barrier)
    result = MergeProjections().apply(graph, context)
    graph.lint()
    groups = [tuple(member.name for member in members) for members in context.members.values()]
    assert result.matches == sum(names[0].startswith("weight") for names in groups)
    return groups


def linears(graph: fx.Graph) -> int:
    return sum(node.target is F.linear for node in graph.nodes)


def test_one_matmul_gives_what_three_gave() -> None:
    for bias in (False, True):
        module, x = Projections(bias), torch.randn(5, 8)
        graph = module.graph()
        before = run(graph, x)
        assert len(merge(graph)) == 1 + bias
        assert linears(graph) == 2  # the fourth is behind the barrier
        for old, new in zip(before, run(graph, x), strict=True):
            torch.testing.assert_close(new, old)


def test_nothing_is_merged_across_a_split_op() -> None:
    """Its output would have to cross the cut."""
    graph = Projections().graph()
    assert merge(graph) == [("weight_0", "weight_1", "weight_2")]


def test_a_weight_read_elsewhere_stays() -> None:
    """A tied embedding, say."""
    graph = Projections().graph()
    (weight,) = [node for node in graph.nodes if node.name == "weight_1"]
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*output.args[0], weight),)
    assert merge(graph) == [("weight_0", "weight_2")]


def test_dtypes_do_not_mix() -> None:
    graph = Projections().graph()
    (weight,) = [node for node in graph.nodes if node.name == "weight_1"]
    weight.meta["example_value"] = weight.meta["example_value"].half()
    assert merge(graph) == [("weight_0", "weight_2")]


def test_a_graph_without_such_linears_is_left_alone() -> None:
    """Weights that are the caller's arguments are not ours to move."""
    graph = Projections().graph()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.name = "argument_" + node.name
    before = str(graph)
    assert merge(graph) == []
    assert str(graph) == before
