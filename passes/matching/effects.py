"""The effects of calls: the tensors that they change in place, and the tensors whose memory they return."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching.torch_ir import (
    ADD,
    CASTS,
    CAT,
    CHUNK,
    GELU,
    GETITEM,
    LINEAR,
    MEAN,
    MUL,
    NEG,
    POW,
    RMS_NORM,
    RSQRT,
    SILU,
    SPLIT,
    SQUARE,
    SUB,
    TRANSPOSE,
    argument,
    is_call,
    is_tensor,
    same_shape,
    same_size,
    value_of,
)
from piecegraph.passes.ops.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

DIV = frozenset({operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide"})
DROPOUT = frozenset({F.dropout, torch.dropout})
EXPAND = frozenset({"expand", "expand_as"})
SQUEEZE = frozenset({torch.squeeze, "squeeze"})
UNSQUEEZE = frozenset({torch.unsqueeze, "unsqueeze"})
VIEW = frozenset({"view", "view_as"})
RESHAPE = frozenset({torch.reshape, torch.flatten, "reshape", "reshape_as", "flatten"})
CONTIGUOUS = frozenset({"contiguous"})
CLONE = frozenset({torch.clone, "clone"})
_MORE_VIEWS = frozenset(
    {torch.permute, torch.narrow, torch.select, torch.t, torch.movedim, torch.unflatten, torch.detach}
    | {"permute", "narrow", "select", "t", "movedim", "unflatten", "detach"}
)
VIEWS = TRANSPOSE | SQUEEZE | UNSQUEEZE | EXPAND | VIEW | _MORE_VIEWS
"""Calls whose result is their first argument's memory, whatever its layout."""

_SEVERAL_VIEWS = CHUNK | SPLIT | {torch.unbind, "unbind"}
"""Calls that return several views of their first argument."""

VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes of a tensor that are views of it. Dynamo writes reading one as a call of `getattr`, but for `data`."""

_READS_DATA = ("torch._C._autograd", "_get_data_attr")
"""The module and name of the function by which Dynamo writes `tensor.data`; torch has no public name for it."""

_EMBEDDINGS = frozenset({F.embedding, F.embedding_bag})
_STATISTICS = _EMBEDDINGS | {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}
"""Functions that may change an argument although neither their names nor a schema say so."""

ELEMENTWISE = (
    (ADD | SUB | MUL | DIV | NEG | POW | SQUARE | RSQRT | SILU | GELU)
    | {torch.sqrt, torch.exp, torch.log, torch.abs, torch.cos, torch.sin, torch.tanh, torch.sigmoid, torch.relu}
    | {"sqrt", "exp", "log", "abs", "cos", "sin", "tanh", "sigmoid", "relu", "reciprocal", "clamp", "masked_fill"}
    | {torch.reciprocal, torch.clamp, torch.clip, torch.maximum, torch.minimum, torch.where, torch.masked_fill}
    | {F.relu, F.sigmoid, F.tanh, F.softplus, F.mish, F.elu, F.leaky_relu, F.relu6, F.hardswish, F.logsigmoid}
    | {operator.floordiv, operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne, operator.invert}
)
"""Calls that compute each number of their result from the numbers in its place, broadcast."""

_NEW_MEMORY = (
    (ELEMENTWISE | CAT | LINEAR | MEAN | RMS_NORM | CLONE)
    | {torch.matmul, torch.bmm, torch.mm, torch.addmm, operator.matmul, torch.stack, torch.sum, torch.softmax}
    | {F.embedding, F.layer_norm, torch.layer_norm, F.softmax, torch.topk, torch.sort, torch.cumsum, torch.histc}
    | {torch.arange, torch.zeros, torch.ones, torch.empty, torch.empty_like, torch.zeros_like, torch.ones_like}
    | {torch.index_select, torch.gather, torch.repeat_interleave, torch._grouped_mm}
    | {"matmul", "sum", "softmax", "topk", "sort", "cumsum", "new_empty", "new_zeros", "index_select", "gather"}
    | {"repeat_interleave", "repeat", "argmax"}
)


def is_pure(node: fx.Node) -> bool:
    """Return True if dropping an unread node is known to change nothing, False if in doubt.

    FX's own test calls every method and every unregistered packet pure, in-place ones included.
    """
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return False
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    target = node.target
    if (schema := _schema_of(target)) is not None:
        return not schema.is_mutable and not schema.name.startswith(("c10d", "_c10d"))
    if isinstance(target, OpOverloadPacket | HigherOrderOperator):
        return False
    if _updated_statistics(node):
        return False
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or "torch"
    if module in ("_operator", "operator"):
        return not (name.startswith("i") and hasattr(operator, name[1:])) and name not in ("setitem", "delitem")
    if name == "_log_api_usage_once" or reads_view_attribute(node):
        return True
    if not module.startswith("torch") or "functorch" in module or "autocast" in module:
        return False  # enters or leaves a region
    return value_of(node) is not None and not name.endswith("_")


def reads_view_attribute(node: fx.Node) -> bool:
    """Return whether a node reads an attribute of a tensor that is a view of the tensor."""
    target = node.target
    if (getattr(target, "__module__", ""), getattr(target, "__name__", "")) == _READS_DATA:
        return is_tensor(node.args[0])
    return node.target is getattr and is_tensor(node.args[0]) and node.args[1] in VIEW_ATTRIBUTES


def _updated_statistics(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a function without a trailing underscore changes in place.

    They are the running statistics of a normalisation in training, and an embedding's table that is renormalised.
    """
    if node.target not in _STATISTICS:
        return ()
    if node.target in _EMBEDDINGS:
        max_norm = argument(node, 3 if node.target is F.embedding else 4, "max_norm")
        return _nodes_in([argument(node, 1, "weight")]) if max_norm is not None else ()
    is_functional = node.target in (F.batch_norm, F.instance_norm)
    running = [
        argument(node, 1 if is_functional else 3, "running_mean"),
        argument(node, 2 if is_functional else 4, "running_var"),
    ]
    name = "training" if node.target in (F.batch_norm, torch.batch_norm) else "use_input_stats"
    trains = argument(node, 5, name, node.target is F.instance_norm)
    return _nodes_in(running) if trains is not False else ()


def _schema_of(target: Any) -> Any:
    """Return the schema of a registered op; None for other functions, and for a packet of several overloads."""
    if isinstance(target, OpOverloadPacket):
        overloads = target.overloads()
        target = getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target._schema if isinstance(target, OpOverload) else None


def erase_dead(graph: fx.Graph, keep: Iterable[fx.Node] = ()) -> None:
    """Erase every pure call whose result nobody reads, but for those of `keep` and for assertions."""
    kept = set(keep)
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output") or node in kept or not is_pure(node):
            continue
        if value_of(node) is not None or getattr(node.target, "__name__", "") == "_log_api_usage_once":
            graph.erase_node(node)


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a call changes in place; if in doubt, all of its arguments."""
    if node.op == "call_method":
        is_in_place = str(node.target).endswith("_") and str(node.target) != "__getitem__"
        return _nodes_in(node.args[:1]) if is_in_place else ()
    if node.op != "call_function":
        return ()
    if node.target in _STATISTICS:
        return _updated_statistics(node)
    if (schema := _schema_of(node.target)) is not None:
        arguments = enumerate(schema.arguments)
        written = [
            argument(node, i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        return _nodes_in(written)
    if is_pure(node):
        return ()
    if node.target is operator.setitem or getattr(node.target, "__module__", "") in ("_operator", "operator"):
        return _nodes_in(node.args[:1])
    return tuple(each for each in node.all_input_nodes if not isinstance(value_of(each), torch.SymInt))


def changed_between(first: fx.Node, last: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return the first of `tensors` that a call between `first` and `last` may change in place, and that call.

    A reader at `last` would then read something else than a reader at `first`. Returns None if there is no such call.
    """
    tensors = tuple(tensors)
    node = first.next
    while node is not last:
        if written_by(node):
            memory = Memory(node.graph, (node,))
            changed = next((each for each in tensors if memory.is_written(each)), None)
            if changed is not None:
                return changed, node
        node = node.next
    return None


def is_unmodified_input(node: fx.Node) -> bool:
    """Return whether a node is an input, or a view of one, that no call changes under any name in this graph.

    The tensor's contents are then there before anything is launched. Kernels read weights before they wait for the
    preceding kernel (`kernels/common/overlapped.py`).
    """
    while (source := view_source(node) or _whole_of(node)) is not None:
        node = source
    return node.op in ("placeholder", "get_attr") and not _is_changed(node)


def _is_changed(node: fx.Node) -> bool:
    """Return whether a call changes a tensor, or one of several parts of a tensor, under its name or that of a view."""
    return any(
        node in written_by(user) or (node in (view_source(user), _whole_of(user)) and _is_changed(user))
        for user in node.users
    )


def _whole_of(node: fx.Node) -> fx.Node | None:
    """Return what a call cuts into several views, or the views of which a call takes one, or None."""
    is_cut = is_call(node, _SEVERAL_VIEWS) or (is_call(node, GETITEM) and is_call(node.args[0], _SEVERAL_VIEWS))
    return node.args[0] if is_cut and isinstance(node.args[0], fx.Node) else None


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose memory a call returns, with the same or another layout; None if it may be a copy."""
    if not is_tensor(node) or not node.args or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    if is_call(node, VIEWS) or reads_view_attribute(node):
        return source
    if is_call(node, GETITEM):
        return source if _is_basic_index(node.args[1]) else None
    if is_call(node, RESHAPE):
        return source if is_contiguous(source) or same_shape(node, source) else None
    if is_call(node, CONTIGUOUS):
        is_plain = argument(node, 1, "memory_format") in (None, torch.contiguous_format)
        return source if is_plain and is_contiguous(source) else None
    if is_call(node, CASTS):
        old, new = value_of(source), value_of(node)
        is_plain = not (set(node.kwargs) - {"dtype", "device", "non_blocking"}) and True not in node.args
        return source if is_plain and (old.dtype, old.device) == (new.dtype, new.device) else None
    if is_call(node, DROPOUT):
        return source if argument(node, 1, "p", 0.5) == 0 or argument(node, 2, "training", True) is False else None
    return None


def is_contiguous(node: fx.Node) -> bool:
    """Return whether a tensor is contiguous for all values of its symbols."""
    value = value_of(node)
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size == 1:
            continue  # the stride of a dim of one is never used
        if not same_stride(stride, expected):
            return False
        expected = expected * size
    return True


def same_stride(one: Any, other: Any) -> bool:
    """Return whether two strides are equal, or belong to a tensor without elements.

    Torch writes `Max(1, size)` for a size in a stride, so that no stride is 0.
    """
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return same_size(one, other) or bool((_plain_stride(one) - _plain_stride(other)).expand() == 0)


def _plain_stride(stride: Any) -> Any:
    """Return the stride as an expression, with `Max(1, size)` replaced by `size`."""
    if isinstance(stride, int):
        return stride
    expression = stride.node.expr
    return expression.replace(
        lambda part: type(part).__name__ == "Max" and len(part.args) == 2 and 1 in part.args,
        lambda part: next(each for each in part.args if each != 1),
    )


class Memory:
    """The groups of a graph's tensors that may share memory, too large if in doubt.

    The groups describe the graph at construction. Writes are those of `writers`, or of every node.
    """

    def __init__(self, graph: fx.Graph, writers: Iterable[fx.Node] | None = None) -> None:
        self._group: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for source in may_return(node):
                self._group[self._of(node)] = self._of(source)
        writers = graph.nodes if writers is None else writers
        self._written = {self._of(written) for node in writers for written in written_by(node)}
        self._written_by_name = frozenset(self._written)
        placeholders = {self._of(node) for node in graph.nodes if node.op == "placeholder"}
        if self._written & placeholders:
            self._written |= placeholders  # inputs may share memory with each other
        self._held_outside = placeholders | {
            self._of(result) for result in next(iter(reversed(graph.nodes))).all_input_nodes
        }

    def is_written(self, node: fx.Node) -> bool:
        """Return whether some call may change the tensor, under whichever name."""
        return self._of(node) in self._written

    def is_written_by_name(self, node: fx.Node) -> bool:
        """Return whether some call may change the tensor under a name in this graph, aside from inputs that may share
        memory."""
        return self._of(node) in self._written_by_name

    def is_held_outside(self, node: fx.Node) -> bool:
        """Return whether the tensor may be the memory of an input or of an output of the graph."""
        return self._of(node) in self._held_outside

    def _of(self, node: fx.Node) -> fx.Node:
        while (above := self._group.get(node, node)) is not node:
            self._group[node] = self._group.get(above, above)
            node = above
        return node


def written_inputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the inputs that calls of the graph may change in place, in order."""
    memory = Memory(graph)
    tensors = [node for node in graph.find_nodes(op="placeholder") if is_tensor(node)]
    return tuple(node for node in tensors if memory.is_written_by_name(node))


def may_return(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments whose memory the result of a call may be."""
    if node.op not in ("call_function", "call_method") or value_of(node) is None:
        return ()
    if (schema := _schema_of(node.target)) is not None:
        arguments = enumerate(schema.arguments)
        return _nodes_in([argument(node, i, a.name) for i, a in arguments if a.alias_info is not None])
    if node.target in _NEW_MEMORY and not written_by(node):
        return ()
    if is_call(node, GETITEM) and is_tensor(node.args[0]) and not _is_basic_index(node.args[1]):
        return ()  # an index that is a tensor copies
    if is_call(node, CASTS) and is_tensor(node) and node.args and is_tensor(node.args[0]):
        changes_dtype = value_of(node).dtype != value_of(node.args[0]).dtype
        return () if changes_dtype and node.target != "view" else _nodes_in(node.args[:1])
    if node.target in VIEWS | RESHAPE | CONTIGUOUS | DROPOUT | GETITEM or node.op == "call_method":
        return _nodes_in(node.args[:1])
    return tuple(each for each in node.all_input_nodes if not isinstance(value_of(each), torch.SymInt))


def _is_basic_index(index: Any) -> bool:
    """Return whether an index has only slices, numbers, `...` and None, so that the result is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None
        or part is Ellipsis
        or isinstance(part, slice)
        or (isinstance(part, int) and not isinstance(part, bool))
        or (isinstance(part, fx.Node) and isinstance(value_of(part), torch.SymInt))
        for part in parts
    )


def _nodes_in(arguments: Any) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return tuple(found)
