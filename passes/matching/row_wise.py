"""Rules for calls that compute each row of their result from the same row of their inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching.effects import (
    CLONE,
    CONTIGUOUS,
    DROPOUT,
    ELEMENTWISE,
    RESHAPE,
    SQUEEZE,
    UNSQUEEZE,
    VIEW,
    view_source,
    written_by,
)
from piecegraph.passes.matching.torch_ir import (
    CASTS,
    CAT,
    CHUNK,
    GETITEM,
    LINEAR,
    MEAN,
    RMS_NORM,
    SPLIT,
    TRANSPOSE,
    NoMatch,
    argument,
    is_tensor,
    same_size,
    shape_of,
    swapped_dims,
    value_of,
)
from piecegraph.passes.ops.op_types import OpOverload

MATMUL = frozenset({torch.matmul, operator.matmul, "matmul"})
ADDMM = frozenset({torch.addmm})
MATMULS = LINEAR | MATMUL | ADDMM
SIZED_VIEWS = (VIEW | RESHAPE) - {"view_as", "reshape_as", "flatten", torch.flatten}
"""The views that take the sizes of their result as arguments."""

_VARIANCE = frozenset({torch.var, "var"})
REDUCTIONS = MEAN | {torch.sum, torch.amax, torch.amin, torch.var, "sum", "amax", "amin", "var"}
_SOFTMAX = frozenset({F.softmax, torch.softmax, F.log_softmax, torch.log_softmax, "softmax", "log_softmax"})
_LAYER_NORM = frozenset({F.layer_norm, torch.layer_norm}) | RMS_NORM
_SAME_DIMS = CONTIGUOUS | CLONE

_OURS = {
    "piecegraph::rms_norm": 1,
    "piecegraph::add_rms_norm": 2,
    "piecegraph::act_mul": 1,
    "piecegraph::all_reduce": 1,
}
"""The ops over the last dim, each with how many of its first arguments have the rows."""

_QUANTISED = frozenset(
    f"piecegraph::{name}"
    for name in ("fp8_linear", "grouped_linear", "int4_tiles_linear", "int8_inputs_linear", "int8_linear")
)
"""The linears of few bits; the last argument of some, `largest`, has the rows too."""

Rows = dict[fx.Node, int]
"""Tensors (or tuples of tensors), each with the dim that counts its rows."""


def row_operands(node: fx.Node, dim: int) -> Rows:
    """Return the tensors that `node` reads row by row to compute its own rows, which dim `dim` counts.

    The node reads its other inputs as a whole. Raises `NoMatch` with the reason if the node is not, or not known to be,
    a function of single rows.
    """
    if node.op not in ("call_function", "call_method"):
        raise NoMatch(f"{node.name} is computed elsewhere")
    if written_by(node):
        raise NoMatch(f"{node.name} ({_name(node)}) changes a tensor in place")
    if isinstance(node.target, OpOverload) and node.target._schema.name in _OURS:
        return _over_last_dim(node, dim)
    if isinstance(node.target, OpOverload) and node.target._schema.name in _QUANTISED:
        return _quantised_linear(node, dim)
    rule = next((rule for spellings, rule in _RULES if node.target in spellings), None)
    if rule is None:
        raise NoMatch(f"{node.name} ({_name(node)}) is not known to work row by row")
    return rule(node, dim)


def sized_for(node: fx.Node, dim: int) -> tuple[Any, ...]:
    """Return the arguments of a call of `SIZED_VIEWS`, as `reshape` takes them, for any number of rows."""
    return (node.args[0], *(-1 if each == dim else size for each, size in enumerate(shape_of(node))))


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _refuse(node: fx.Node, why: str) -> NoMatch:
    return NoMatch(f"{node.name} ({_name(node)}) {why}")


def _first(node: fx.Node) -> fx.Node:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        raise _refuse(node, "reads no tensor")
    return source


def _is_read_once(node: fx.Node, source: fx.Node) -> bool:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found.count(source) == 1


def _ndim(node: fx.Node) -> int:
    value = value_of(node)
    return len((value[0] if isinstance(value, tuple | list) else value).shape)


def _elementwise(node: fx.Node, dim: int) -> Rows:
    """Return the operands that have rows; those that are broadcast over the rows are read as a whole."""
    if not is_tensor(node):
        raise _refuse(node, "does not make one tensor")
    shape = shape_of(node)
    found: Rows = {}
    for each in node.all_input_nodes:
        if not is_tensor(each):
            continue
        sizes = shape_of(each)
        at = dim - (len(shape) - len(sizes))
        if at < 0 or (isinstance(sizes[at], int) and sizes[at] == 1):
            continue
        if not same_size(sizes[at], shape[dim]):
            raise _refuse(node, f"reads {each.name}, whose rows are others")
        found[each] = at
    return found


def _same_dims(node: fx.Node, dim: int) -> Rows:
    return {_first(node): dim}


def _dropout(node: fx.Node, dim: int) -> Rows:
    if view_source(node) is None:
        raise _refuse(node, "draws at random")
    return {_first(node): dim}


def _linear(node: fx.Node, dim: int) -> Rows:
    source = _first(node)
    if dim == _ndim(node) - 1 or not _is_read_once(node, source):
        raise _refuse(node, "mixes rows")
    return {source: dim}


def _quantised_linear(node: fx.Node, dim: int) -> Rows:
    """Return the input, and the magnitudes of its tokens if they are given."""
    assert isinstance(node.target, OpOverload)
    names = [each.name for each in node.target._schema.arguments]
    found = _linear(node, dim)
    if "largest" in names and (largest := argument(node, names.index("largest"), "largest")) is not None:
        found[largest] = dim
    return found


def _matmul(node: fx.Node, dim: int) -> Rows:
    matrix = argument(node, 1, "other")
    if not is_tensor(matrix) or len(shape_of(matrix)) != 2:
        raise _refuse(node, "multiplies by what is not one matrix")
    return _linear(node, dim)


def _addmm(node: fx.Node, dim: int) -> Rows:
    bias, rows, matrix = node.args[:3] if len(node.args) >= 3 else (None, None, None)
    if not (is_tensor(bias) and is_tensor(rows) and is_tensor(matrix)):
        raise _refuse(node, "names its arguments")
    if len(shape_of(bias)) != 1 or dim != 0 or rows in (bias, matrix):
        raise _refuse(node, "mixes rows")
    return {rows: 0}


def _layer_norm(node: fx.Node, dim: int) -> Rows:
    normalized = argument(node, 1, "normalized_shape", ())
    if dim >= _ndim(node) - len(normalized):
        raise _refuse(node, "normalizes over the rows")
    return _linear(node, dim) if dim < _ndim(node) - 1 else {}


def _softmax(node: fx.Node, dim: int) -> Rows:
    over = argument(node, 1, "dim")
    if not isinstance(over, int) or over % _ndim(node) == dim:
        raise _refuse(node, "is over the rows")
    return {_first(node): dim}


def _reduction(node: fx.Node, dim: int) -> Rows:
    source = _first(node)
    over = argument(node, 1, "dim")
    over = (over,) if isinstance(over, int) else over
    if not isinstance(over, tuple | list) or not over or not is_tensor(node):
        raise _refuse(node, "reduces over every dim")
    ndim = _ndim(source)
    reduced = {each % ndim for each in over}
    is_kept = argument(node, 3 if node.target in _VARIANCE else 2, "keepdim", False)
    kept = [each for each in range(ndim) if is_kept or each not in reduced]
    if kept[dim] in reduced:
        raise _refuse(node, "reduces over the rows")
    return {source: kept[dim]}


def _cat(node: fx.Node, dim: int) -> Rows:
    parts, along = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    if not isinstance(parts, tuple | list) or not all(map(is_tensor, parts)) or along % _ndim(node) == dim:
        raise _refuse(node, "is along the rows")
    return dict.fromkeys(parts, dim)


def _split(node: fx.Node, dim: int) -> Rows:
    if argument(node, 2, "dim", 0) % _ndim(node) == dim:
        raise _refuse(node, "cuts the rows apart")
    return {_first(node): dim}


def _getitem(node: fx.Node, dim: int) -> Rows:
    source, index = _first(node), node.args[1]
    if not is_tensor(source):
        return {source: dim}  # an item of a tuple
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        raise _refuse(node, "is indexed by more than slices")
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (_ndim(source) - len(parts) + 1), *parts[at + 1 :])
    if dim < len(parts) and parts[dim] != slice(None):
        raise _refuse(node, "takes some of the rows")
    return {source: dim}


def _transpose(node: fx.Node, dim: int) -> Rows:
    swapped = swapped_dims(node)
    if swapped is None:
        raise _refuse(node, "is not understood")
    source, one, other = swapped
    return {source: {one: other, other: one}.get(dim, dim)}


def _reshape(node: fx.Node, dim: int) -> Rows:
    """Return the source if the rows are a dim of their own before and after, preceded by equally many numbers."""
    source = _first(node)
    if not is_tensor(source) or value_of(source).dtype != value_of(node).dtype:
        raise _refuse(node, "reads the memory as something else")
    if node.target in SQUEEZE and len(node.args) + len(node.kwargs) < 2:
        raise _refuse(node, "drops whichever dims are 1")
    before, after = shape_of(source), shape_of(node)
    if node.target in SIZED_VIEWS and not all(isinstance(size, int) for size in (*after[:dim], *after[dim + 1 :])):
        raise _refuse(node, "has more than one size that is a symbol")
    for each, size in enumerate(before):
        if same_size(size, after[dim]) and same_size(math.prod(before[:each]), math.prod(after[:dim])):
            return {source: each}
    raise _refuse(node, "puts rows together or apart")


def _over_last_dim(node: fx.Node, dim: int) -> Rows:
    if dim == _ndim(node) - 1:
        raise _refuse(node, "normalizes over the rows")
    assert isinstance(node.target, OpOverload)
    operands: Sequence[Any] = node.args[: _OURS[node.target._schema.name]]
    if not all(map(is_tensor, operands)) or not all(each not in operands for each in node.args[len(operands) :]):
        raise _refuse(node, "is not called with its tensors first")
    return dict.fromkeys(operands, dim)


_RULES: tuple[tuple[frozenset[Any], Callable[[fx.Node, int], Rows]], ...] = (
    (ELEMENTWISE | CASTS, _elementwise),
    (LINEAR, _linear),
    (MATMUL, _matmul),
    (ADDMM, _addmm),
    (_LAYER_NORM, _layer_norm),
    (_SOFTMAX, _softmax),
    (REDUCTIONS, _reduction),
    (CAT, _cat),
    (CHUNK | SPLIT, _split),
    (GETITEM, _getitem),
    (TRANSPOSE, _transpose),
    (VIEW | RESHAPE | SQUEEZE | UNSQUEEZE, _reshape),
    (DROPOUT, _dropout),
    (_SAME_DIMS, _same_dims),
)
