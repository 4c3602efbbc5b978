"""A snapshot of a graph before a pass: to see whether the pass changed the graph, to show it, and to restore it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from piecegraph.compiler.common.split_ops import op_name


class _SavedNode(NamedTuple):  # there are thousands, and a frozen dataclass takes four times as long to make
    node: fx.Node
    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> _SavedNode:
        return cls(node, node.name, node.op, node.target, node.args, node.kwargs, node.type, dict(node.meta))

    def is_unchanged(self) -> bool:
        now = self.node
        return (
            now.op == self.op
            and now.target is self.target
            and is_same_argument(now.args, self.args)
            and is_same_argument(now.kwargs, self.kwargs)
        )


class GraphSnapshot:
    """The nodes of a graph at one time, with their arguments.

    FX replaces the arguments of a node and never changes them, so a snapshot copies only `meta`, and is cheap.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = tuple(map(_SavedNode.of, graph.nodes))
        self._set = frozenset(was.node for was in self.nodes)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._set

    def is_unchanged(self, graph: fx.Graph) -> bool:
        """Return whether the graph has the same nodes in the same order, each with the arguments it had."""
        return len(graph.nodes) == len(self.nodes) and all(
            now is was.node and was.is_unchanged() for now, was in zip(graph.nodes, self.nodes, strict=True)
        )

    def rewired(self) -> dict[fx.Node, tuple[Any, Any]]:
        """Return the nodes whose arguments changed, with the earlier args and kwargs."""
        return {
            was.node: (was.args, was.kwargs)
            for was in self.nodes
            if not (is_same_argument(was.node.args, was.args) and is_same_argument(was.node.kwargs, was.kwargs))
        }

    def restore(self, graph: fx.Graph) -> None:
        """Restore `graph` to this snapshot. Its nodes are new and have the names of the old nodes."""
        for node in list(graph.nodes):
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        made: dict[fx.Node, fx.Node] = {}
        for was in self.nodes:
            args, kwargs = (fx.map_arg(arguments, made.__getitem__) for arguments in (was.args, was.kwargs))
            node = graph.create_node(was.op, was.target, args, kwargs, type_expr=was.type)
            node.name = was.name  # the node that had the name is gone, but FX uses a name once
            node.meta = was.meta
            made[was.node] = node

    def text(self) -> str:
        """Return the graph as text, a line a node."""
        return _text([(was.name, was.op, was.target, was.args, was.kwargs, was.meta) for was in self.nodes])


def graph_text(graph: fx.Graph) -> str:
    """Return a graph as text, a line a node: the op, its arguments, and the dtype and shape of its value."""
    return _text([(node.name, node.op, node.target, node.args, node.kwargs, node.meta) for node in graph.nodes])


def is_same_argument(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal; nodes and values that are not plain data equal only themselves."""
    if one is other:
        return True
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_same_argument, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(is_same_argument, one.values(), other.values()))
    if type(one) is not type(other):
        return False
    if isinstance(one, slice):
        return is_same_argument((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return isinstance(one, bool | int | float | str | torch.dtype | torch.device) and one == other


def _text(nodes: Sequence[tuple[str, str, Any, Any, Any, dict[str, Any]]]) -> str:
    lines = []
    for name, op, target, args, kwargs, meta in nodes:
        if op == "output":
            lines.append(f"return {args[0]}")
            continue
        function = op_name(target) if op == "call_function" else str(target)
        given = [*map(_argument, args), *(f"{key}={_argument(value)}" for key, value in kwargs.items())]
        call = "input" if op == "placeholder" else f"{function}({', '.join(given)})"
        made_by = f"  # {meta['made_by']}" if "made_by" in meta else ""
        lines.append(f"{name} = {call} : {_value(meta.get('example_value', meta.get('val')))}{made_by}")
    return "\n".join(lines) + "\n"


def _argument(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else str(value)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    return type(value).__name__ if isinstance(value, torch.nn.Module) else str(value)
