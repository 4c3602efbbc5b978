"""Words for torch IR as Dynamo writes it: what a node computes, whichever way the model's author spelt it."""

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
LINEAR = frozenset({F.linear, torch._C._nn.linear})
CAT = frozenset({torch.cat, torch.concat, torch.concatenate})
CHUNK = frozenset({torch.chunk, "chunk"})
SPLIT = frozenset({torch.split, "split", torch.functional.split, torch.split_with_sizes, "split_with_sizes"})
GETITEM = frozenset({operator.getitem})
TRANSPOSE = frozenset({torch.transpose, torch.swapaxes, "transpose", "swapaxes"})
CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long"})
"""Spellings: functions, and methods by name. In-place forms are none of them."""


class NoMatch(Exception):
    """A site is not what it looked like. The message is the reason that a `Miss` gives."""


def value_of(node: fx.Node) -> Any:
    """The example value Dynamo computed for a node: a FakeTensor, a SymInt, a tuple of these, or None."""
    return node.meta.get("example_value")


def is_call(node: Any, spellings: frozenset[Any]) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in spellings


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, however it was passed."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def operands(node: Any, spellings: frozenset[Any]) -> tuple[Any, Any] | None:
    """The two arguments of `a + b`, `torch.mul(a, b)` and the like; None if it is another call or has options."""
    if not is_call(node, spellings) or set(node.kwargs) - {"other", "exponent"}:
        return None
    both = (*node.args, *node.kwargs.values())
    return (both[0], both[1]) if len(both) == 2 else None


def other_operand(node: fx.Node, spellings: frozenset[Any], one: fx.Node) -> Any:
    """What `one` is multiplied by, or added to, in `node`; None if `node` is no such call."""
    both = operands(node, spellings)
    if both is None or one not in both:
        return None
    return both[1] if both[0] is one else both[0]


def number(value: Any) -> float | None:
    """A constant of the graph; None if it is a node, or no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Of a node for which `is_tensor` holds."""
    dtype: torch.dtype = value_of(node).dtype
    return dtype


def shape_of(node: fx.Node) -> torch.Size:
    """Of a node for which `is_tensor` holds; sizes may be symbols, see `same_size`."""
    shape: torch.Size = value_of(node).shape
    return shape


def same_size(one: Any, other: Any) -> bool:
    """Two sizes are equal whatever their symbols stand for. Asking adds no guard."""
    return statically_known_true(one == other)


def same_shape(one: fx.Node, other: fx.Node) -> bool:
    a, b = shape_of(one), shape_of(other)
    return len(a) == len(b) and all(map(same_size, a, b))


def cast_source(node: Any) -> fx.Node | None:
    """What a node casts to another dtype, or to the one it has; None if it is no cast, or moves its input too."""
    if not is_call(node, CASTS) or not is_tensor(node) or not node.args or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    return source if value_of(source).device == value_of(node).device else None


def is_widening(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Every value of `narrow` is a value of `wide`, both of them floats."""
    return narrow.is_floating_point and wide.is_floating_point and torch.promote_types(narrow, wide) == wide


def strip_widening(node: fx.Node) -> fx.Node:
    """The node whose very values `node` has, perhaps in a wider float type."""
    source = cast_source(node)
    while source is not None and is_widening(dtype_of(source), dtype_of(node)):
        node, source = source, cast_source(source)
    return node


def last_dim(node: fx.Node) -> int | None:
    """The size of a tensor's last dim; None if it has none, or a symbol's."""
    shape = shape_of(node)
    return shape[-1] if len(shape) and isinstance(shape[-1], int) else None


def swapped_dims(node: Any) -> tuple[fx.Node, int, int] | None:
    """(source, dim, dim), no dim negative, if a node swaps two dims of a tensor."""
    if not is_call(node, TRANSPOSE) or not is_tensor(node) or not is_tensor(node.args[0]):
        return None
    ndim = len(shape_of(node))
    dims = [argument(node, 1, "dim0"), argument(node, 2, "dim1")]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    return node.args[0], dims[0] % ndim, dims[1] % ndim


def is_last_dim(dim: Any, ndim: int) -> bool:
    """`dim` of a call, an int or a sequence, names the last of `ndim` dims and no other."""
    dims = tuple(dim) if isinstance(dim, tuple | list | torch.Size) else (dim,)
    return dims in ((-1,), (ndim - 1,))


@dataclass(frozen=True, slots=True)
class Columns:
    """`source[..., start:stop]`."""

    source: fx.Node
    start: int
    stop: int


def columns_of(node: Any) -> Columns | None:
    """Which columns of which tensor a node is, be it an index, or an item of a chunk or a split."""
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
    """A new call ahead of `before`, of a function or of the method `target` names, with its example value computed:
    what is matched later reads it."""
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
    """The tensor itself if `columns` are all it has, else a view of them."""
    if (columns.start, columns.stop) == (0, last_dim(columns.source)):
        return columns.source
    return insert_call(graph, before, operator.getitem, columns.source, (Ellipsis, slice(columns.start, columns.stop)))


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that nothing reads, and then those that nothing reads any more."""
    left = set(nodes)
    while unread := [node for node in left if not node.users]:
        for node in unread:
            graph.erase_node(node)
        left.difference_update(unread)
