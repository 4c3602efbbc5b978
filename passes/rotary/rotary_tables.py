"""Compute rotary tables, the cosines and sines of positions times frequencies, as two results of one op.

Inductor's kernels for the tables would wait for all preceding kernels to end before they start.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import SQUEEZE, UNSQUEEZE, VIEWS, Memory, view_source
from piecegraph.passes.ops.rotary_tables import ROTARY_TABLES

COS = frozenset({torch.cos, "cos"})
SIN = frozenset({torch.sin, "sin"})
REPEAT = frozenset({"repeat"})


@dataclass(frozen=True, slots=True)
class _Angles:
    """The source of one table: `function(positions * inv_freq) * scaling`, with equal halves."""

    positions: fx.Node  # [num_tokens] int64
    inv_freq: fx.Node  # [dim / 2] float32
    scaling: float


def fuse_rotary_tables(graph: fx.Graph, cos: fx.Node, sin: fx.Node) -> bool:
    """Replace `cos` and `sin` by one op if both are computed from the same positions and frequencies.

    `cos` and `sin` are float32, `[1, num_tokens, dim]` or without the first dim. The op returns the bits of torch's own
    calls. Returns whether they were replaced.
    """
    found = _angles(cos, COS)
    if found is None or found != _angles(sin, SIN):
        return False
    tables, sources = (cos, sin), (found.positions, found.inv_freq)
    made_of, memory = _between(tables, sources), Memory(graph)
    if any(map(memory.is_written, (*made_of, *sources))):
        return False
    first = next(node for node in graph.nodes if node in tables)
    both = ir.insert_call(graph, first, ROTARY_TABLES, found.positions, found.inv_freq, found.scaling)
    outputs = [ir.insert_call(graph, first, operator.getitem, both, i) for i in range(2)]
    for table, output in zip(tables, outputs, strict=True):
        _replace(graph, table, output)
    ir.erase_unread(graph, made_of)
    return True


def _replace(graph: fx.Graph, table: fx.Node, output: fx.Node) -> None:
    """Make the readers of `table` read `output`, `[num_tokens, dim]`, in the layout that they read before."""
    if len(ir.shape_of(table)) == 3:
        for reader in list(table.users):
            if ir.is_call(reader, SQUEEZE) and ir.argument(reader, 1, "dim") in (0, -3):
                reader.replace_all_uses_with(output)
                graph.erase_node(reader)
        if table.users:
            output = ir.insert_call(graph, table, "unsqueeze", output, 0)
    table.replace_all_uses_with(output)


def _between(tables: Iterable[fx.Node], sources: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes from `tables` back to `sources`, without the sources."""
    found, ends = list(tables), set(sources)
    for node in found:
        found += [each for each in node.all_input_nodes if each not in ends and each not in found]
    return found


def _angles(table: fx.Node, function: frozenset[Any]) -> _Angles | None:
    """Return the source of `table`, or None if the table is made in another way."""
    node, scaling = table, 1.0
    while not ir.is_call(node, function):
        if ir.dtype_of(node) != torch.float32:
            return None
        both = ir.operands(node, ir.MUL)
        if both is not None:
            node, factor = both if ir.is_tensor(both[0]) else both[::-1]
            if not ir.is_tensor(node) or scaling != 1.0 or (constant := ir.number(factor)) is None:
                return None
            scaling = constant
        elif (source := _source_of_same_shape(node)) is not None:
            node = source
        else:
            return None
    repeated = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not ir.is_tensor(repeated) or (half := _repeated_half(repeated)) is None:
        return None
    swap = ir.swapped_dims(half)
    product = half if swap is None else swap[0]
    factors = ir.operands(product, ir.MUL)
    if factors is None or not all(map(ir.is_tensor, factors)) or ir.dtype_of(product) != torch.float32:
        return None
    ndim = len(ir.shape_of(product))
    if ndim < 2:
        return None
    dims = list(range(ndim))
    if swap is not None:
        dims[swap[1]], dims[swap[2]] = dims[swap[2]], dims[swap[1]]
    for pair in (factors, factors[::-1]):
        positions = _vector(pair[0], ndim, dims[-2], torch.int64)
        inv_freq = _vector(pair[1], ndim, dims[-1], torch.float32)
        if positions is not None and inv_freq is not None and _fits(table, positions, inv_freq):
            return _Angles(positions, inv_freq, scaling)
    return None


def _source_of_same_shape(node: fx.Node) -> fx.Node | None:
    """Return the source of a node that only drops or adds a first dim of 1, or casts to the dtype it has; else None."""
    source = view_source(node)
    if source is None or ir.is_call(node, VIEWS - SQUEEZE - UNSQUEEZE):
        return None
    one, other = (list(ir.shape_of(each)) for each in (node, source))
    while len(one) > len(other) and _is_one(one[0]):
        one = one[1:]
    while len(other) > len(one) and _is_one(other[0]):
        other = other[1:]
    is_same = len(one) == len(other) and all(map(ir.same_size, one, other))
    return source if is_same and ir.dtype_of(source) == ir.dtype_of(node) else None


def _repeated_half(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node repeats twice in its last dim, or None."""
    if ir.is_call(node, ir.CAT):
        parts = ir.argument(node, 0, "tensors")
        if not isinstance(parts, list | tuple) or len(parts) != 2 or parts[0] is not parts[1]:
            return None
        is_last = ir.is_last_dim(ir.argument(node, 1, "dim", 0), len(ir.shape_of(node)))
        return parts[0] if is_last and ir.is_tensor(parts[0]) else None
    if not ir.is_call(node, REPEAT) or node.kwargs or not ir.is_tensor(source := node.args[0]):
        return None
    return source if node.args[1:] == (*(1,) * (len(ir.shape_of(source)) - 1), 2) else None


def _vector(node: fx.Node, ndim: int, dim: int, dtype: torch.dtype) -> fx.Node | None:
    """Return the one-dimensional tensor of `dtype` whose numbers, perhaps cast to float32, lie along `dim` of a factor
    of a product of `ndim` dims; None if there is none."""
    shape = [1] * (ndim - len(ir.shape_of(node))) + list(ir.shape_of(node))
    size = shape.pop(dim)
    if ir.dtype_of(node) != torch.float32 or not all(map(_is_one, shape)):
        return None
    while len(ir.shape_of(node)) != 1 or ir.dtype_of(node) != dtype:
        source = view_source(node)
        if source is None or ir.dtype_of(source) != ir.dtype_of(node):
            source = ir.cast_source(node)
            if source is None or (ir.dtype_of(source), ir.dtype_of(node)) != (dtype, torch.float32):
                return None
        sizes = [each for each in ir.shape_of(source) if not _is_one(each)] or [1]
        if len(sizes) != 1 or not ir.same_size(sizes[0], size):
            return None
        node = source
    return node


def _is_one(size: Any) -> bool:
    """Return whether the size is 1 for every call, not only for the traced one."""
    return isinstance(size, int) and size == 1


def _fits(table: fx.Node, positions: fx.Node, inv_freq: fx.Node) -> bool:
    """Return whether the op's results equal `table`, except for a first dim of 1, and are on its device."""
    shape = list(ir.shape_of(table))
    if len(shape) == 3 and _is_one(shape[0]):
        shape = shape[1:]
    sizes = (ir.shape_of(positions)[0], 2 * ir.shape_of(inv_freq)[0])
    devices = {ir.value_of(node).device for node in (table, positions, inv_freq)}
    return len(shape) == 2 and all(map(ir.same_size, shape, sizes)) and len(devices) == 1
