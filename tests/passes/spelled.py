"""Graphs of functions as somebody spells them, with a value for each node, as passes get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Graph:
    graph = fx.Tracer().trace(function)
    _Recorder(fx.GraphModule(nn.Module(), graph)).run(*inputs)
    return graph


def run(graph: fx.Graph, *inputs: torch.Tensor) -> Any:
    return fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs)


def calls(graph: fx.Graph) -> list[str]:
    """Return the calls of a graph in order; our ops without their namespace."""
    return [_called(node) for node in graph.nodes if node.op.startswith("call_")]


def text(graph: fx.Graph) -> list[str]:
    """A line a call, and one for what is returned."""
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
        call = f"({', '.join(arguments)})"
        lines.append(f"return {call}" if node.op == "output" else f"{node.name} = {_called(node)}{call}")
    return lines


def _called(node: fx.Node) -> str:
    name: str = getattr(node.target, "__name__", str(node.target))
    return name.removesuffix(".default")
