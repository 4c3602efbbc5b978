"""Pieces that have nothing for Inductor to generate: they run as the graph they are.

Where passes have put kernels of ours around all that is computed, what is left of a piece are their calls, matmuls of
the library, lookups of rows, and views. Inductor would make of it Python that calls the same, after seconds of
compiling; each call would go through its runtime wrappers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.graph import CodeGen

from piecegraph.compiler.split_ops import op_name
from piecegraph.passes.effects import viewed
from piecegraph.passes.torch_ir import GETITEM, LINEAR, argument, is_call, is_tensor, value_of

NOTE = "runs as its graph: there is nothing to generate a kernel for"

DEVICES = frozenset({"cuda"})
"""Types of devices on which that is decided. On a CPU Inductor has more to do about a matmul."""

_EMPTY = frozenset({torch.empty_like, "new_empty"})
"""Room of a dtype that is in the graph. `torch.empty` has that of the process where it names none."""

_EMPTY_OF = frozenset({torch.empty})

_SEVERAL_VIEWS = frozenset({torch.chunk, torch.split, torch.unbind, "chunk", "split", "unbind"})


def runs_as_it_is(graph_module: fx.GraphModule, device_type: str | None = None) -> bool:
    """Nothing in the piece would become a generated kernel, but a lookup of rows, which torch has one for too. Under
    autocast, whose casts are not in the graph, no piece is known to be such.

    `device_type`: where its tensors would be; None: where they are.
    """
    nodes = list(graph_module.graph.nodes)
    tensors = [value for value in map(value_of, nodes) if isinstance(value, torch.Tensor)]
    devices = {device_type or tensor.device.type for tensor in tensors}
    if not devices or not devices <= DEVICES or _autocasts():
        return False
    return not any(_is_generated(node) for node in nodes)


def run_graph(graph_module: fx.GraphModule) -> _GraphPiece:
    """The piece as a function: the same calls in the same order, without gradients and without autocast, as what
    Inductor compiles has."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    graph.set_codegen(_OfAList())
    return _GraphPiece(fx.GraphModule(graph_module, graph).forward)


class _GraphPiece:
    """A piece whose code takes its inputs as a list."""

    def __init__(self, forward: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._forward = forward

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.boxed(list(inputs))

    def boxed(self, inputs: list[Any]) -> Sequence[Any]:
        """Empties the list, and lets go of each input as soon as nothing more is computed of it."""
        if not torch.is_grad_enabled() and not _autocasts():
            return self._forward(inputs)
        with torch.no_grad(), contextlib.ExitStack() as casts:
            for device in DEVICES:
                casts.enter_context(torch.autocast(device, enabled=False))
            return self._forward(inputs)


class _OfAList(CodeGen):
    """Code that takes a list, and empties it: what calls a function keeps what it gives it one by one."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [each.partition(":")[0].partition("=")[0].strip() for each in free_vars if each != "self"]
        lines = [f"def forward(self, inputs){maybe_return_annotation}:"]
        return "\n    ".join([*lines, f"[{', '.join(names)}] = inputs", "inputs.clear()"])


def _autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, DEVICES))


def _is_generated(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return False
    if node.op not in ("call_function", "call_method") or _holds_a_size(node):
        return True
    if not isinstance(value_of(node), torch.Tensor):  # a size, or several results
        return not (_is_ours(node) or _is_of_sizes(node) or is_call(node, _SEVERAL_VIEWS))
    is_room = is_call(node, _EMPTY) or (is_call(node, _EMPTY_OF) and {"dtype", "device"} <= node.kwargs.keys())
    if "out" in node.kwargs:
        return True
    is_there = _is_ours(node) or is_call(node, LINEAR) or is_room or viewed(node) is not None
    return not (is_there or _is_lookup(node) or _is_item(node))


def _is_item(node: fx.Node) -> bool:
    """One of several results."""
    return is_call(node, GETITEM) and not is_tensor(node.args[0])


def _is_lookup(node: fx.Node) -> bool:
    """Of rows, by their numbers in one tensor. A mask is none, as only the GPU knows how many rows it takes; nor is a
    list of numbers, which torch would bring to the GPU at each call."""
    if is_call(node, frozenset({F.embedding})):
        return argument(node, 3, "max_norm") is None
    if not is_call(node, GETITEM):
        return False
    index: Any = node.args[1]
    indices = index if isinstance(index, tuple) else (index,)
    found = [value_of(each) for each in indices if isinstance(each, fx.Node) and is_tensor(each)]
    others = [each for each in indices if not (isinstance(each, fx.Node) and is_tensor(each))]
    if len(found) != 1 or not all(each is None or each is ... or isinstance(each, slice) for each in others):
        return False
    return found[0].dtype in (torch.int32, torch.int64)


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target).startswith("piecegraph::")


def _is_of_sizes(node: fx.Node) -> bool:
    """It gives a number, of numbers or of a tensor's shape."""
    return isinstance(value_of(node), int | torch.SymInt | torch.SymBool) and node.target != "item"


def _holds_a_size(node: fx.Node) -> bool:
    """A symbolic size among its arguments that is no node: only a compiler knows what it is."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in found)
