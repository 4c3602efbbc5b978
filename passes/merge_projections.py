"""`merge-projections`: linears that read the same tensor become one matmul over one stored weight.

Query, key and value of an attention layer, gate and up of an MLP: one larger matmul reads the same bytes
with fewer launches and fuller tiles. Works on the traced graph, before it is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

NAME = "merge-projections"

IsWeight = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A placeholder that took the place of several: their tensors, one after the other along dim 0."""

    placeholder: fx.Node
    members: tuple[fx.Node, ...]  # placeholders, erased from the graph


@dataclass(frozen=True, slots=True)
class Merged:
    """What one group of linears became."""

    linear: fx.Node
    tensors: tuple[MergedTensor, ...]  # the weight, and the bias if there is one


def merge_projections(graph: fx.Graph, is_weight: IsWeight, is_split_op: Callable[[fx.Node], bool]) -> list[Merged]:
    """Rewrite `graph` in place; one entry for each group merged.

    A group: two linears or more over the same input with no split op between them, whose weights
    `[out, in]` are placeholders that `is_weight` allows and nothing else reads, of one dtype and device;
    their biases alike, or none. The new nodes carry no example values.
    """
    return [_merge(graph, group) for group in _groups(graph, is_weight, is_split_op)]


def _groups(graph: fx.Graph, is_weight: IsWeight, is_split_op: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, ...]]:
    groups: dict[object, list[fx.Node]] = {}
    segment = 0
    for node in graph.nodes:
        segment += is_split_op(node)
        if not _is_linear(node, is_weight):
            continue
        weight = _operand(node, 1).meta["example_value"]
        kind = (node.args[0], segment, weight.shape[1], weight.dtype, weight.device, _has_bias(node))
        groups.setdefault(kind, []).append(node)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _is_linear(node: fx.Node, is_weight: IsWeight) -> bool:
    """A linear whose weight and bias are placeholders only it reads."""
    if node.op != "call_function" or node.target not in (F.linear, torch._C._nn.linear) or node.kwargs:
        return False
    if len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return False
    own = [argument for argument in node.args[1:] if argument is not None]
    return all(
        isinstance(argument, fx.Node)
        and argument.op == "placeholder"
        and is_weight(argument)
        and list(argument.users) == [node]
        for argument in own
    )


def _operand(node: fx.Node, position: int) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node), node
    return operand


def _has_bias(node: fx.Node) -> bool:
    return len(node.args) > 2 and node.args[2] is not None


def _merge(graph: fx.Graph, group: tuple[fx.Node, ...]) -> Merged:
    first = group[0]
    weights = tuple(_operand(node, 1) for node in group)
    biases = tuple(_operand(node, 2) for node in group) if _has_bias(first) else ()
    tensors = [_merged_placeholder(graph, members) for members in (weights, biases) if members]
    with graph.inserting_before(first):
        linear = graph.call_function(F.linear, (_operand(first, 0), *(tensor.placeholder for tensor in tensors)))
    start = 0
    for node, weight in zip(group, weights, strict=True):
        size = weight.meta["example_value"].shape[0]
        with graph.inserting_before(node):
            columns: Any = (Ellipsis, slice(start, start + size))
            part = graph.call_function(operator.getitem, (linear, columns))
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start += size
    for tensor in tensors:
        for member in tensor.members:
            graph.erase_node(member)
    return Merged(linear, tuple(tensors))


def _merged_placeholder(graph: fx.Graph, members: tuple[fx.Node, ...]) -> MergedTensor:
    with graph.inserting_before(members[0]):
        return MergedTensor(graph.placeholder("merged_" + members[0].name), members)
