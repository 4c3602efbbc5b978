"""Make the strides of a piece's outputs part of what Inductor compiles.

Inductor gives an output the strides of its graph, unless an unbacked size is in them: then it chooses a layout, and
the next piece, or a split op, gets a tensor that it was not compiled for. Here such an output is written as a
one-dimensional tensor, whose layout is fixed, and read back as a view with the strides that were traced.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from piecegraph.compiler.common.symbolic_sizes import size_at
from piecegraph.passes.matching.torch_ir import value_of

_TRIED_SIZES = (2, 3, 101)
"""Values of every symbol at which layouts are compared: products of sizes that agree at all of them are equal."""


def with_exact_strides(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with outputs fixed to their traced strides where Inductor would not keep them.

    Returns `graph_module` itself where Inductor keeps all strides; `graph_module` is never changed. Two kinds of
    outputs are left as they are: a view of an input, which has that input's strides, and a tensor whose elements do
    not fill its memory.
    """
    bases = _to_fix(graph_module.graph)
    if not bases:
        return graph_module
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copied = graph.node_copy(node, copy_of.__getitem__)
        copy_of[node] = _fixed(copied, bases[node]) if node in bases else copied
    graph.lint()
    return fx.GraphModule(graph_module, graph)


def _to_fix(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    """Return the nodes that make the memory of outputs to fix, with their dims from the outermost in memory inwards."""
    made_by: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node) if node.op != "output" else None
        if isinstance(value, torch.Tensor):
            made_by.setdefault(_storage(value), node)
    found = {}
    for output in graph.output_node().all_input_nodes:
        value = value_of(output)
        if not isinstance(value, torch.Tensor) or not has_unbacked_strides(value):
            continue
        base = made_by[_storage(value)]
        order = dims_by_stride(value_of(base))
        if base.op not in ("placeholder", "get_attr") and order is not None:
            found[base] = order
    return found


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def has_unbacked_strides(value: torch.Tensor) -> bool:
    """Return whether an unbacked size is in the stride of a dim that is not known to be 1."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if not _is_one(size)]
    return bool(free_unbacked_symbols(strides))


def dims_by_stride(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the outermost in memory inwards; None where elements leave gaps in memory or overlap."""
    at = [[(size_at(size, n), size_at(stride, n)) for n in _TRIED_SIZES] for size, stride in _dims(value)]
    matter = [dim for dim, size in enumerate(value.shape) if not _is_one(size)]
    inwards = sorted(matter, key=lambda dim: -at[dim][-1][1])
    for nth in range(len(_TRIED_SIZES)):
        expected = 1
        for dim in reversed(inwards):
            size, stride = at[dim][nth]
            if stride != expected:
                return None
            expected *= size
    ones = [dim for dim in range(value.dim()) if dim not in matter]
    return (*ones, *inwards)


def _dims(value: torch.Tensor) -> Sequence[tuple[Any, Any]]:
    return list(zip(value.shape, value.stride(), strict=True))


def _is_one(size: Any) -> bool:
    """Return whether a size is known to be 1, without adding a guard: a symbol is not."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return bool(expression == 1)


def _fixed(node: fx.Node, order: Sequence[int]) -> fx.Node:
    """Return `node` as a view, with the strides of its value, of a one-dimensional tensor of its elements."""
    graph = node.graph
    value = value_of(node)

    def call(function: Any, *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    sizes = [
        graph.call_method("size", (node, dim)) if isinstance(size, torch.SymInt) else int(size)
        for dim, size in enumerate(value.shape)
    ]
    strides: list[Any] = [1] * len(sizes)
    inner: Any = 1
    for dim in reversed(order):
        strides[dim] = inner
        inner = sizes[dim] if inner == 1 else inner if sizes[dim] == 1 else call(operator.mul, inner, sizes[dim])
    row = graph.call_method("reshape", (graph.call_method("permute", (node, list(order))), -1))
    fixed = call(torch.as_strided, row, sizes, strides)
    fixed.meta = dict(node.meta)
    return fixed
