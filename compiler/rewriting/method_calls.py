"""Write calls of a tensor's methods in the one way that passes and Inductor's cache know."""

from __future__ import annotations

import torch
from torch import fx


def name_methods(graph: fx.Graph) -> int:
    """Turn calls of functions that are methods of `torch.Tensor` into calls of methods, in place; return how many.

    Where a default device is set (`torch.set_default_device`), Dynamo writes `x.split(sizes)` as a call of the function
    `torch.Tensor.split`. Passes know the method by its name only, and a compiled piece that calls the function cannot
    be saved by torch.
    """
    found = [node for node in graph.nodes if node.op == "call_function" and _is_method(node.target)]
    for node in found:
        node.op, node.target = "call_method", node.target.__name__
    return len(found)


def _is_method(target: object) -> bool:
    name = getattr(target, "__name__", "")
    return getattr(target, "__qualname__", "") == f"Tensor.{name}" and getattr(torch.Tensor, name, None) is target
