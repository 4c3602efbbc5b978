"""Make the strides of a piece's outputs part of what Inductor compiles.

Inductor gives an output the strides of its graph, unless an unbacked size is in them: then it chooses a layout, and
the next piece, or a split op, gets a tensor that it was not compiled for. If the unbacked size is only in the stride of
a dim of size 1, the layout is right by itself, but for an output that is concatenated, too: it is computed in the
memory of the whole. Here such an output is written as a
one-dimensional tensor, whose layout is fixed, and read back as a view with the strides that were traced.

Torch refuses a write into a view of such a view. So an output that the graph writes in place is fixed after the last
write, and views of it that were made before and are read after are made again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from piecegraph.compiler.common.symbolic_sizes import size_at
from piecegraph.passes.matching.effects import is_pure, written_by
from piecegraph.passes.matching.torch_ir import CAT, value_of

_JOINS = CAT | {torch.stack, torch.hstack, torch.vstack, torch.dstack, torch.column_stack}

_TRIED_SIZES = (2, 3, 101)
"""Values of every symbol at which layouts are compared: products of sizes that agree at all of them are equal."""


@dataclass(frozen=True, slots=True)
class _Fix:
    """A node whose memory is to be fixed."""

    base: fx.Node  # makes the memory
    order: tuple[int, ...]  # its dims from the outermost in memory inwards
    after: fx.Node  # the last call that writes into the memory, or `base`
    views: tuple[fx.Node, ...]  # of the memory, made up to `after`, that are read after it


def with_exact_strides(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with outputs fixed to their traced strides where Inductor would not keep them.

    Returns `graph_module` itself where Inductor keeps all strides; `graph_module` is never changed. Three kinds of
    outputs are left as they are: a view of an input, which has that input's strides; a tensor whose elements do not
    fill its memory; and one of which a view would have to be made again that cannot be.
    """
    fixes = _to_fix(graph_module.graph)
    if not fixes:
        return graph_module
    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
        for fix in (each for each in fixes if each.after is node):
            copy_of[fix.base] = _fixed(copy_of[fix.base], fix.order)
            for view in fix.views:
                copy_of[view] = (
                    graph.node_copy(view, copy_of.__getitem__) if is_pure(view) else copy_of[view.all_input_nodes[0]]
                )
    graph.lint()
    return fx.GraphModule(graph_module, graph)


def _to_fix(graph: fx.Graph) -> tuple[_Fix, ...]:
    """Return the nodes that make the memory of outputs to fix."""
    sharing: dict[int, list[fx.Node]] = {}
    written_last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        for storage in dict.fromkeys(_storages(value_of(node))):
            sharing.setdefault(storage, []).append(node)
        for written in written_by(node):
            written_last.update((storage, node) for storage in _storages(value_of(written)))
    found: dict[int, _Fix] = {}
    for output in graph.output_node().all_input_nodes:
        value = value_of(output)
        if not isinstance(value, torch.Tensor) or not free_unbacked_symbols(value.stride()):
            continue
        storage = _storage(value)
        if not has_unbacked_strides(value) and not any(map(_is_joined, sharing[storage])):
            continue
        base = sharing[storage][0]
        order = dims_by_stride(value_of(base)) if isinstance(value_of(base), torch.Tensor) else None
        if base.op in ("placeholder", "get_attr") or order is None or storage in found:
            continue
        after = written_last.get(storage, base)
        views = _read_later(sharing[storage], after)
        if views is not None:
            found[storage] = _Fix(base, order, after, views)
    return tuple(found.values())


def _is_joined(node: fx.Node) -> bool:
    """Return whether a tensor becomes a part of another one."""
    return any(user.target in _JOINS for user in node.users)


def _read_later(sharing: Sequence[fx.Node], after: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the views to make again behind `after`, in order: those of `sharing` that are read there, and those that
    they are made from. None where one cannot be made again.

    `sharing`: the nodes of one memory in order, its maker first.
    """
    base = sharing[0]
    early = [node for node in sharing[1:] if not after < node]
    needed = {node for node in early if any(after < user for user in node.users)}
    for node in reversed(early):
        if node not in needed:
            continue
        sources = [each for each in node.all_input_nodes if each in sharing]
        if not is_pure(node) and not _returns_first_argument(node):
            return None
        needed.update(each for each in sources if each is not base)
    return tuple(node for node in early if node in needed)


def _returns_first_argument(node: fx.Node) -> bool:
    """Return whether a call that writes in place returns the tensor it was given, as `copy_` does."""
    first = node.args[0] if node.args else None
    return (
        isinstance(first, fx.Node) and first in written_by(node) and _layout(value_of(first)) == _layout(value_of(node))
    )


def _layout(value: Any) -> tuple[str, ...] | None:
    """Return sizes, strides and offset as text, which compares symbols without adding a guard; None for no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return str(tuple(value.shape)), str(value.stride()), str(value.storage_offset())


def _storages(value: Any) -> Iterator[int]:
    """Yield the storages of the tensors in a value, which may be several tensors."""
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, torch.Tensor):
            yield _storage(each)


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
    row = call(torch.reshape, call(torch.permute, node, list(order)), (-1,))  # torch saves no methods of new values
    fixed = call(torch.as_strided, row, sizes, strides)
    fixed.meta = dict(node.meta)
    return fixed
