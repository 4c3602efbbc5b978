"""`merge-projections`: linears that read the same tensor become one matmul over one stored weight.

Query, key and value of an attention layer, gate and up of an MLP: one larger matmul reads the same bytes
with fewer launches and fuller tiles. Works on the traced graph, before it is cut.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.graph_pass import GraphPass, PassContext, PassResult


@dataclass(frozen=True, slots=True)
class MergeProjections(GraphPass):
    """A group: two linears or more over the same input with no split op between them, whose weights `[out, in]`
    are weights (`PassContext.is_weight`) nothing else reads, of one dtype and device; their biases alike, or none.
    """

    name: ClassVar[str] = "merge-projections"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        groups = _groups(graph, context)
        for group in groups:
            _merge(graph, group, context)
        return PassResult(matches=len(groups))


def _groups(graph: fx.Graph, context: PassContext) -> list[tuple[fx.Node, ...]]:
    groups: dict[object, list[fx.Node]] = {}
    segment = 0
    for node in graph.nodes:
        segment += context.is_split_op(node)
        if not _is_linear(node, context):
            continue
        weight = _operand(node, 1).meta["example_value"]
        kind = (node.args[0], segment, weight.shape[1], weight.dtype, weight.device, _has_bias(node))
        groups.setdefault(kind, []).append(node)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _is_linear(node: fx.Node, context: PassContext) -> bool:
    """A linear whose weight and bias are placeholders only it reads."""
    if node.op != "call_function" or node.target not in (F.linear, torch._C._nn.linear) or node.kwargs:
        return False
    if len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return False
    own = [argument for argument in node.args[1:] if argument is not None]
    return all(
        isinstance(argument, fx.Node)
        and argument.op == "placeholder"
        and context.is_weight(argument)
        and list(argument.users) == [node]
        for argument in own
    )


def _operand(node: fx.Node, position: int) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node), node
    return operand


def _has_bias(node: fx.Node) -> bool:
    return len(node.args) > 2 and node.args[2] is not None


def _merge(graph: fx.Graph, group: tuple[fx.Node, ...], context: PassContext) -> None:
    first = group[0]
    weights = tuple(_operand(node, 1) for node in group)
    biases = tuple(_operand(node, 2) for node in group) if _has_bias(first) else ()
    tensors = [context.concatenated(members) for members in (weights, biases) if members]
    with graph.inserting_before(first):
        linear = graph.call_function(F.linear, (_operand(first, 0), *tensors))
    start = 0
    for node, weight in zip(group, weights, strict=True):
        size = weight.meta["example_value"].shape[0]
        with graph.inserting_before(node):
            columns: Any = (Ellipsis, slice(start, start + size))
            part = graph.call_function(operator.getitem, (linear, columns))
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start += size
    for member in (*weights, *biases):
        graph.erase_node(member)
