"""A vocabulary for torch IR as Dynamo writes it: what a node computes, however the model's author spelled it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

ADD = frozenset({operator.add, torch.add, "add"})
MUL = frozenset({operator.mul, torch.mul, torch.multiply, "mul", "multiply"})
SUB = frozenset({operator.sub, torch.sub, torch.subtract, "sub", "subtract"})
NEG = frozenset({operator.neg, torch.neg, torch.negative, "neg", "negative"})
POW = frozenset({operator.pow, torch.pow, "pow"})
SQUARE = frozenset({torch.square, "square"})
MEAN = frozenset({torch.mean, "mean"})
RSQRT = frozenset({torch.rsqrt, "rsqrt"})
RMS_NORM = frozenset({F.rms_norm, torch.rms_norm})
SILU = frozenset({F.silu, torch._C._nn.silu})
GELU = frozenset({F.gelu})
LINEAR = frozenset({F.linear})
CAT = frozenset({torch.cat, torch.concat, torch.concatenate})
CHUNK = frozenset({torch.chunk, "chunk"})
SPLIT = frozenset({torch.split, "split", torch.functional.split, torch.split_with_sizes, "split_with_sizes"})
GETITEM = frozenset({operator.getitem})
TRANSPOSE = frozenset({torch.transpose, torch.swapaxes, "transpose", "swapaxes"})
CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long"})
"""The spellings of a cast: functions, and methods by name. In-place forms are left out."""


class NoMatch(Exception):
    """The error that a site does not match. Its message is the reason that a `Miss` gives."""


def value_of(node: fx.Node) -> Any:
    """Return the example value Dynamo computed for a node: a FakeTensor, a SymInt, a tuple of these, or None."""
    return node.meta.get("example_value")


def is_call(node: Any, spellings: frozenset[Any]) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in spellings


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, passed by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def operands(node: Any, spellings: frozenset[Any]) -> tuple[Any, Any] | None:
    """Return the two arguments of `a + b`, `torch.mul(a, b)` and the like; None for other calls and for options."""
    if not is_call(node, spellings) or set(node.kwargs) - {"other", "exponent"}:
        return None
    both = (*node.args, *node.kwargs.values())
    return (both[0], both[1]) if len(both) == 2 else None


def other_operand(node: fx.Node, spellings: frozenset[Any], one: fx.Node) -> Any:
    """Return the operand that `node` multiplies by `one`, or adds to it; None if `node` is another call."""
    both = operands(node, spellings)
    if both is None or one not in both:
        return None
    return both[1] if both[0] is one else both[0]


def number(value: Any) -> float | None:
    """Return a constant of the graph as a float; None for a node, or for anything but a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node for which `is_tensor` holds."""
    dtype: torch.dtype = value_of(node).dtype
    return dtype


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node for which `is_tensor` holds. Sizes may be symbols (`same_size`)."""
    shape: torch.Size = value_of(node).shape
    return shape


def same_size(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal for all values of their symbols. Adds no guard."""
    return statically_known_true(one == other)


def same_shape(one: fx.Node, other: fx.Node) -> bool:
    a, b = shape_of(one), shape_of(other)
    return len(a) == len(b) and all(map(same_size, a, b))


def cast_source(node: Any) -> fx.Node | None:
    """Return the tensor that a node casts, if only to the dtype it has; None for other calls and for moves between
    devices."""
    if not is_call(node, CASTS) or not is_tensor(node) or not node.args or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    return source if value_of(source).device == value_of(node).device else None


def is_widening(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether both dtypes are floats and every value of `narrow` is a value of `wide`."""
    return narrow.is_floating_point and wide.is_floating_point and torch.promote_types(narrow, wide) == wide


def strip_widening(node: fx.Node) -> fx.Node:
    """Return the node whose exact values `node` has, perhaps in a wider float type."""
    source = cast_source(node)
    while source is not None and is_widening(dtype_of(source), dtype_of(node)):
        node, source = source, cast_source(source)
    return node


def last_dim(node: fx.Node) -> int | None:
    """Return the size of a tensor's last dim; None if the tensor has no dims or the size is a symbol."""
    shape = shape_of(node)
    return shape[-1] if len(shape) and isinstance(shape[-1], int) else None


def swapped_dims(node: Any) -> tuple[fx.Node, int, int] | None:
    """Return (source, dim, dim), no dim negative, if a node swaps two dims of a tensor; else None."""
    if not is_call(node, TRANSPOSE) or not is_tensor(node) or not is_tensor(node.args[0]):
        return None
    ndim = len(shape_of(node))
    dims = [argument(node, 1, "dim0"), argument(node, 2, "dim1")]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    return node.args[0], dims[0] % ndim, dims[1] % ndim


def is_last_dim(dim: Any, ndim: int) -> bool:
    """Return whether `dim` of a call, an int or a sequence, names the last of `ndim` dims and no other."""
    dims = tuple(dim) if isinstance(dim, tuple | list | torch.Size) else (dim,)
    return dims in ((-1,), (ndim - 1,))


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a tensor: `source[..., start:stop]`."""

    source: fx.Node
    start: int
    stop: int


def columns_of(node: Any) -> Columns | None:
    """Return the columns that a node is: an index into a tensor, or an item of a chunk or a split; else None."""
    if not is_call(node, GETITEM) or not is_tensor(node):
        return None
    source, index = node.args
    if is_call(source, CHUNK | SPLIT) and isinstance(index, int):
        return _columns_of_part(source, index)
    if not is_tensor(source) or not isinstance(index, tuple) or (size := last_dim(source)) is None:
        return None
    *before, columns = index
    whole = len(index) == len(shape_of(source)) and Ellipsis not in before
    others = before if whole else before[1:]
    if not whole and before[:1] != [Ellipsis]:
        return None
    if any(each != slice(None) for each in others) or not isinstance(columns, slice) or columns.step not in (None, 1):
        return None
    if not all(isinstance(bound, int | None) for bound in (columns.start, columns.stop)):
        return None
    start, stop, _ = columns.indices(size)
    return Columns(source, start, stop)


def _columns_of_part(node: fx.Node, index: int) -> Columns | None:
    source = node.args[0]
    if not is_tensor(source) or not is_last_dim(argument(node, 2, "dim", 0), len(shape_of(source))):
        return None
    sizes = [part.shape[-1] for part in value_of(node)]
    index = index + len(sizes) if index < 0 else index
    if not all(isinstance(size, int) for size in sizes):
        return None
    return Columns(source, sum(sizes[:index]), sum(sizes[: index + 1]))


def insert_call(graph: fx.Graph, before: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call before `before`, of a function or of the method named `target`, and return it.

    The call's example value is computed, because later matches read it.
    """
    values = fx.map_arg(args, value_of)
    with graph.inserting_before(before):
        if isinstance(target, str):
            node = graph.call_method(target, args)
            node.meta["example_value"] = getattr(values[0], target)(*values[1:])
        else:
            node = graph.call_function(target, args)
            node.meta["example_value"] = target(*values)
    return node


def insert_columns(graph: fx.Graph, before: fx.Node, columns: Columns) -> fx.Node:
    """Return the tensor itself if `columns` are all it has, else insert a view of them and return that."""
    if (columns.start, columns.stop) == (0, last_dim(columns.source)):
        return columns.source
    return insert_call(graph, before, operator.getitem, columns.source, (Ellipsis, slice(columns.start, columns.stop)))


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase the `nodes` that nothing reads, and then those that nothing reads any more."""
    left = set(nodes)
    while unread := [node for node in left if not node.users]:
        for node in unread:
            graph.erase_node(node)
        left.difference_update(unread)
