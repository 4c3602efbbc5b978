"""Traced graphs of transformers' own models, small, as passes get them."""

from __future__ import annotations

import copy

import torch
from torch import fx

from piecegraph.compiler.common.split_ops import split_op_matcher
from piecegraph.compiler.tracing.signature import BoundInput
from piecegraph.config import DEFAULT_SPLIT_OPS
from piecegraph.passes.merge_projections import MergeProjections
from tests.passes.family_runs import family
from tests.passes.pass_context import FakeContext


class FamilyContext(FakeContext):
    """Parameters of the model are weights."""

    def __init__(self, graph: fx.Graph, parameters: frozenset[str]) -> None:
        super().__init__(graph, split_op_matcher(graph, DEFAULT_SPLIT_OPS))
        self.parameters = parameters

    def is_weight(self, node: fx.Node) -> bool:
        return node.name in self.parameters


def traced_family(name: str, dtype: torch.dtype) -> tuple[fx.Graph, FamilyContext]:
    """A graph of one's own of family `name`, and what its passes may ask."""
    traced = family(name, dtype).traced
    graph = copy.deepcopy(traced.graph_module.graph)
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs = zip(placeholders, traced.inputs, strict=True)
    parameters = (each for each, bound in inputs if isinstance(bound, BoundInput) and bound.kind == "parameter")
    return graph, FamilyContext(graph, frozenset(parameters))


def merged_family(name: str, dtype: torch.dtype) -> tuple[fx.Graph, FamilyContext]:
    """The same after `merge-projections`, with a value for each node."""
    graph, context = traced_family(name, dtype)
    MergeProjections().apply(graph, context)
    for node in graph.nodes:
        if node.op == "call_function" and "example_value" not in node.meta:
            values = fx.map_arg(node.args, lambda used: used.meta["example_value"])
            node.meta["example_value"] = node.target(*values)
    return graph, context
