"""A `PassContext` over a graph made by hand: placeholders whose name starts with `weight` or `bias` are weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx


class FakeContext:
    def __init__(self, graph: fx.Graph, is_split_op: Callable[[fx.Node], bool] = lambda node: False) -> None:
        self.graph = graph
        self.is_split_op = is_split_op
        self.members: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def is_weight(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name.startswith(("weight", "bias"))

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        with self.graph.inserting_before(weights[0]):
            whole = self.graph.placeholder("merged_" + weights[0].name)
        whole.meta["example_value"] = torch.cat([weight.meta["example_value"] for weight in weights])
        self.members[whole] = tuple(weights)
        return whole
