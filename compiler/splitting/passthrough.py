"""Pieces for which Inductor would generate no kernel: they run as their graphs.

Where passes have replaced all computation by our kernels, a piece consists of calls of these, library matmuls, lookups
of rows, and views. Inductor would compile for seconds and then make the same calls through its runtime wrappers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.graph import CodeGen

from piecegraph.compiler.common.split_ops import op_name
from piecegraph.passes.matching.effects import view_source
from piecegraph.passes.matching.torch_ir import GETITEM, LINEAR, argument, is_call, is_tensor, value_of

NOTE = "runs as its graph: there is nothing to generate a kernel for"
"""The note in the report on a piece that needs no codegen."""

SHARES_MEMORY = "runs as its graph: inputs or outputs share memory that is written"
"""The note in the report on a piece whose inputs or outputs share memory."""

MATMUL_DEVICES = frozenset({"cuda"})
"""The types of devices on which pieces with matmuls may need no codegen. On a CPU Inductor does more about a matmul."""

DEVICES = frozenset({"cpu", "cuda"})
"""The types of devices on which pieces may need no codegen."""

_EMPTY = frozenset({torch.empty_like, "new_empty"})
"""Calls that allocate with a dtype known from the graph; `torch.empty` may take the default dtype of the process."""

_EMPTY_OF = frozenset({torch.empty})

_SEVERAL_VIEWS = frozenset({torch.chunk, torch.split, torch.unbind, "chunk", "split", "unbind"})


def needs_no_codegen(graph_module: fx.GraphModule, device_type: str | None = None) -> bool:
    """Return whether Inductor would generate no kernel for a piece, except a lookup of rows, for which torch has one.

    Under autocast, whose casts are not in the graph, the answer is False. `device_type` is the type of device for
    which to decide; None means the device of the piece's tensors.
    """
    nodes = list(graph_module.graph.nodes)
    tensors = [value for value in map(value_of, nodes) if isinstance(value, torch.Tensor)]
    devices = {device_type or tensor.device.type for tensor in tensors}
    if not devices or not devices <= DEVICES or is_autocast_on():
        return False
    if not devices <= MATMUL_DEVICES and any(is_call(node, LINEAR) for node in nodes):
        return False
    return not any(_is_generated(node) for node in nodes)


def build_graph_runner(graph_module: fx.GraphModule, *, casts: bool = False) -> GraphPiece:
    """Return the piece as a function that makes the same calls in the same order.

    Like code that Inductor compiles, the function runs without gradients and without autocast. `casts`: the piece was
    traced under autocast, and runs under it.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    forward = fx.GraphModule(graph_module, graph).forward
    return GraphPiece(forward, casts=casts)


class GraphPiece:
    """A piece that runs as its graph. Its code takes its inputs as a list (boxed), so that inputs are freed early."""

    def __init__(self, forward: Callable[[list[Any]], Sequence[Any]], *, casts: bool) -> None:
        self._forward = forward
        self._casts = casts

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.boxed(list(inputs))

    def boxed(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the piece; empty the list, and drop each input after its last use."""
        if not torch.is_grad_enabled() and (self._casts or not is_autocast_on()):
            return self._forward(inputs)
        with torch.no_grad(), contextlib.ExitStack() as casts:
            for device in () if self._casts else DEVICES:
                casts.enter_context(torch.autocast(device, enabled=False))
            return self._forward(inputs)


class _BoxedCodeGen(CodeGen):
    """A code generator for functions that take a list and empty it: a caller would keep separate arguments alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        names = [each.partition(":")[0].partition("=")[0].strip() for each in free_vars if each != "self"]
        lines = [f"def forward(self, inputs){maybe_return_annotation}:"]
        return "\n    ".join([*lines, f"[{', '.join(names)}] = inputs", "inputs.clear()"])


def is_autocast_on() -> bool:
    """Return whether autocast is on for a type of device on which pieces may run as their graphs."""
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
    is_there = _is_ours(node) or is_call(node, LINEAR) or is_room or view_source(node) is not None
    return not (is_there or _is_lookup(node) or _is_item(node))


def _is_item(node: fx.Node) -> bool:
    """Return whether `node` takes one of several results."""
    return is_call(node, GETITEM) and not is_tensor(node.args[0])


def _is_lookup(node: fx.Node) -> bool:
    """Return whether `node` looks up rows by indices in one integer tensor.

    A mask is excluded, since only the GPU knows how many rows it selects, and so is a list of numbers, which torch
    would copy to the GPU at each call.
    """
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
    """Return whether `node` computes a number from numbers or from a tensor's shape."""
    return isinstance(value_of(node), int | torch.SymInt | torch.SymBool) and node.target != "item"


def _holds_a_size(node: fx.Node) -> bool:
    """Return whether a symbolic size that is not a node is among the arguments: only a compiler knows its value."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in found)
