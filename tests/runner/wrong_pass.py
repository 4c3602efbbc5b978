"""A user pass that is wrong on purpose, and one that is right."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching.graph_pass import GraphPass, PassContext, PassResult


@dataclass(frozen=True)
class ScaleLinear(GraphPass):
    """The result of the `number`-th linear times `factor`; with `among`, only in a graph of so many linears."""

    number: int
    factor: float = 1.01
    among: int | None = None

    name: ClassVar[str] = "scale-linear"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        linears = graph.find_nodes(op="call_function", target=F.linear)
        if self.among not in (None, len(linears)):
            return PassResult(matches=0)
        linear = linears[self.number]
        with graph.inserting_after(linear):
            scaled = graph.call_function(operator.mul, (linear, self.factor))
        linear.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return PassResult(matches=1)
