"""`fuse-lookups`: run embeddings, and other selections of rows by index, with one kernel of ours.

Torch has several kernels for this, chosen by how many rows are taken. Each is loaded when it is first launched (one of
them takes 63 ms), and none starts before the preceding kernel has ended. Rows of several tensors by the same indices
are taken at once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching.effects import changed_between, is_unmodified_input
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import GETITEM, NoMatch, argument, is_call, is_tensor, shape_of, value_of
from piecegraph.passes.ops.take_rows import TAKE_ROWS

_EMBEDDING = frozenset({F.embedding})
_INDEX_SELECT = frozenset({torch.index_select, "index_select"})
_NUMBERS = (torch.int64, torch.int32)

MIN_SIZE = 32
"""The fewest numbers in a row for which our kernel is used."""


@dataclass(frozen=True, slots=True)
class FuseLookups(GraphPass):
    """A pass that replaces lookups of rows by `piecegraph::take_rows`.

    A site is an embedding, or a tensor indexed by an input of integers along a dim before which all dims have size 1.
    The result is exact, but an index out of range gives NaN instead of an error (`ops/take_rows.py`).
    """

    name: ClassVar[str] = "fuse-lookups"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        found: list[fx.Node] = []
        misses = []
        for node in graph.nodes:
            if not is_call(node, _EMBEDDING | _INDEX_SELECT | GETITEM):
                continue
            try:
                if _lookup(node) is not None:
                    found.append(node)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
        left = list(found)
        while left:  # what is looked up in a lookup has another source once that one is taken
            together = _together([lookup for lookup in map(_lookup, left) if lookup is not None])
            taken = {lookup.node for lookup in together}
            _take(together)
            left = [node for node in left if node not in taken]
        return PassResult(len(found), tuple(misses))


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup: `source[:, index]`."""

    node: fx.Node
    source: fx.Node
    index: fx.Node
    dim: int
    wraps: bool  # a negative number counts from the end


def _lookup(node: fx.Node) -> _Lookup | None:
    """Return the lookup of a call, or None if the call is not a site. Raises `NoMatch` for a site that our kernel does
    not support."""
    if is_call(node, _EMBEDDING):
        index, source, dim = argument(node, 0, "input"), argument(node, 1, "weight"), 0
    elif is_call(node, _INDEX_SELECT):
        source, dim, index = (argument(node, at, name) for at, name in enumerate(("input", "dim", "index")))
    else:
        source = node.args[0]
        place = _indexed_dim(node)
        if place is None:
            return None
        dim, index = place
    if not (is_tensor(source) and is_tensor(index) and isinstance(dim, int)):
        return None
    if is_call(node, _INDEX_SELECT) and value_of(index).dim() != 1:
        return None  # one number, whose dim stays
    if value_of(index).dtype not in _NUMBERS:
        return None  # a mask, of which only the GPU knows how many rows it takes
    if not is_call(node, _EMBEDDING) and not is_unmodified_input(index):
        return None  # by numbers that a layer computes, as experts are: Inductor makes it part of what reads the rows
    if is_call(node, _EMBEDDING) and argument(node, 3, "max_norm") is not None:
        raise NoMatch("max_norm changes the table in place")
    dim %= len(shape_of(source))
    if not all(isinstance(size, int) and size == 1 for size in shape_of(source)[:dim]):
        raise NoMatch(f"there are other dims ahead of dim {dim}")
    if value_of(source).dtype.is_complex or value_of(source).dtype is torch.bool:
        raise NoMatch(f"the rows are {str(value_of(source).dtype).removeprefix('torch.')}")
    behind = shape_of(source)[dim + 1 :]
    if not all(isinstance(size, int) for size in behind) or math.prod(behind) < MIN_SIZE:
        return None  # single numbers are what Inductor's own kernels look up well
    return _Lookup(node, source, index, dim, wraps=is_call(node, GETITEM))


def _indexed_dim(node: fx.Node) -> tuple[int, fx.Node] | None:
    """Return the dim that is indexed by exactly one tensor, and that tensor; None if the index does anything else."""
    source, index = node.args
    if not is_tensor(source):
        return None
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    tensors = [part for part in parts if isinstance(part, fx.Node)]
    others = [part for part in parts if not isinstance(part, fx.Node)]
    if len(tensors) != 1 or not all(part is Ellipsis or part == slice(None) for part in others):
        return None
    dim = parts.index(tensors[0])
    if Ellipsis in parts[:dim]:
        dim += len(shape_of(source)) - len(parts)
    return dim, tensors[0]


def _together(left: list[_Lookup]) -> list[_Lookup]:
    """Return the first lookup, and the following ones by the same index whose sources exist when the first one runs."""
    first = left[0]
    order = {node: number for number, node in enumerate(first.node.graph.nodes)}
    return [
        first,
        *(
            each
            for each in left[1:]
            if (each.index, each.dim, each.wraps) == (first.index, first.dim, first.wraps)
            and order[each.source] < order[first.node]
            and changed_between(first.node, each.node, (each.source, each.index)) is None
        ),
    ]


def _take(together: list[_Lookup]) -> None:
    first = together[0]
    graph = first.node.graph
    with graph.inserting_before(first.node):
        sources = [lookup.source for lookup in together]
        taken = graph.call_function(TAKE_ROWS, (sources, first.index, first.dim, first.wraps))
        values = [value_of(each) for each in sources]
        taken.meta["example_value"] = TAKE_ROWS(values, value_of(first.index), first.dim, first.wraps)
        for number, lookup in enumerate(together):
            rows = graph.call_function(operator.getitem, (taken, number))
            rows.meta["example_value"] = taken.meta["example_value"][number]
            lookup.node.replace_all_uses_with(rows)
    for lookup in together:
        graph.erase_node(lookup.node)
