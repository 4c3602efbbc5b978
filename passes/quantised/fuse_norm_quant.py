"""`fuse-norm-quant`: fuse an RMS norm with the rounding of its result for the quantised linears that read it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.op_types import OpOverload
from piecegraph.passes.ops.quantised.rounded_norms import ADD_RMS_NORM_ROUNDED, RMS_NORM_ROUNDED
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from piecegraph.passes.quantised.rounding_readers import is_rounded, read_rounded, rounding_readers

ROUNDED: Mapping[Any, OpOverload] = {RMS_NORM: RMS_NORM_ROUNDED, ADD_RMS_NORM: ADD_RMS_NORM_ROUNDED}
"""Each norm op with the op that replaces it, whose result is rounded."""


@dataclass(frozen=True)
class FuseNormQuant(GraphPass):
    """A pass that makes the rounding of quantised linears' inputs a part of the norm that they read.

    A site is every `rms_norm` and `add_rms_norm` whose norm a linear reads that rounds its input to int8 or e4m3. It
    matches if nothing else reads the norm and all linears round it alike; these become `piecegraph::rounded_linear`.
    The pass runs after `fuse-add-rms-norm`, which makes these ops, and before `fuse-all-reduce`, which can make a sum
    over the ranks part of them. The bits stay the same, but for the last ones of norms in float32 on a GPU.
    """

    name: ClassVar[str] = "fuse-norm-quant"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in [node for node in graph.nodes if node.op == "call_function" and node.target in ROUNDED]:
            normed = [node] if node.target is RMS_NORM else _items(node, 0)
            if not is_rounded(normed):
                continue
            try:
                rounding, readers = rounding_readers(normed)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            dtype = ir.dtype_of(normed[0])
            made = ir.insert_call(graph, node, ROUNDED[node.target], *node.args, *rounding.arguments)
            read_rounded(graph, made, readers, dtype)
            if node.target is ADD_RMS_NORM and (totals := _items(node, 1)):
                total = ir.insert_call(graph, node, operator.getitem, made, 2)
                for each in totals:
                    each.replace_all_uses_with(total)
            ir.erase_unread(graph, {node, *node.users})
            matches += 1
        return PassResult(matches, tuple(misses))


def _items(node: fx.Node, index: int) -> list[fx.Node]:
    """Return the users of `node` that take item `index` of its result."""
    return [user for user in node.users if ir.is_call(user, ir.GETITEM) and user.args[1] == index]
