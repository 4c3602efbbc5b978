"""`fuse-act-quant`: fuse a gated activation with the rounding of its result for the quantised linears that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.quantised.rounded_act_mul import ACT_MUL_ROUNDED
from piecegraph.passes.quantised.rounding_readers import is_rounded, read_rounded, rounding_readers


@dataclass(frozen=True)
class FuseActQuant(GraphPass):
    """A pass that makes the rounding of a quantised linear's input a part of the gated activation that it reads.

    A site is every `act_mul` that a linear reads which rounds its input to int8 or e4m3. It matches if nothing else
    reads the activation; the linear becomes `piecegraph::rounded_linear`. The pass runs after `fuse-act-mul`, which
    makes `act_mul`. The bits stay the same.
    """

    name: ClassVar[str] = "fuse-act-quant"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in graph.find_nodes(op="call_function", target=ACT_MUL):
            if not is_rounded([node]):
                continue
            try:
                rounding, readers = rounding_readers([node])
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            made = ir.insert_call(graph, node, ACT_MUL_ROUNDED, *node.args, *rounding.arguments)
            read_rounded(graph, made, readers, ir.dtype_of(node))
            graph.erase_node(node)
            matches += 1
        return PassResult(matches, tuple(misses))
