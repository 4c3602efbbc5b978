"""`fuse-all-reduce`: fuse a sum over the ranks with the residual add and the RMS norm behind it into one op.

The op may add up in place, in the buffer that the partial sums are in, so that a sum is no longer copied first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import RESHAPE, VIEW, is_contiguous, may_return, view_source
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.collectives import ALL_REDUCE
from piecegraph.passes.ops.op_types import OpOverload
from piecegraph.passes.ops.quantised.rounded_norms import WITHOUT_SUM

FUSED: Mapping[Any, OpOverload] = {without: fused for fused, without in WITHOUT_SUM.items()}
"""The ops whose summand may be a sum over ranks, each with the op that makes that sum too."""

_MASKED_FILL = frozenset({torch.masked_fill, "masked_fill"})
_EMBEDDING = frozenset({F.embedding})


@dataclass(frozen=True)
class FuseAllReduce(GraphPass):
    """A pass that makes `piecegraph::all_reduce` a part of the norm that reads it: an `add_rms_norm`, rounded or not.

    A site is every all-reduce but that of an embedding, behind which nothing is added. It matches if nothing else reads
    the sum, perhaps as a view of another shape, and if nothing else has the memory of what is added up, which the fused
    op overwrites. The pass runs after `fuse-linear`, which makes an `add_norm_linear` of a norm that one linear reads.
    The bits stay the same.
    """

    name: ClassVar[str] = "fuse-all-reduce"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in graph.find_nodes(op="call_function", target=ALL_REDUCE):
            if _is_of_embedding(node):
                continue
            try:
                norm, views = _norm_behind(node)
                _check_memory(node, norm, context)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            _fuse(graph, node, views, norm)
            matches += 1
        return PassResult(matches, tuple(misses))


def _is_of_embedding(all_reduce: fx.Node) -> bool:
    """Return whether the summands are embeddings, of which each rank has those of its part of the vocabulary.

    They may be scaled before the sum.
    """
    rows = all_reduce.args[0]
    while ir.is_call(rows, _MASKED_FILL | ir.MUL | ir.CASTS):
        rows = rows.args[0]
    return ir.is_call(rows, _EMBEDDING)


def _norm_behind(all_reduce: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the op of `FUSED` that adds the sum to another tensor, and the views of the sum that lead to it.

    Raises `NoMatch` if anything else reads the sum.
    """
    views: list[fx.Node] = []
    added = all_reduce
    while True:
        readers = list(added.users)
        if len(readers) != 1:
            found = ", ".join(map(str, readers)) or "nothing"
            raise NoMatch(f"{added} is read by {found}; wanted is one residual add and norm")
        (norm,) = readers
        if norm.target in FUSED:
            break
        if not (_is_other_shape(norm, added) and is_contiguous(_summand(all_reduce))):
            raise NoMatch(f"{added} is read by {norm}; wanted is add_rms_norm, add_rms_norm_rounded or add_norm_linear")
        views.append(norm)
        added = norm
    if added not in norm.args[:2] or added in norm.args[2:]:
        raise NoMatch(f"{norm} reads {added} as another argument than a summand")
    if norm.args[0] is norm.args[1]:
        raise NoMatch(f"{norm} adds {added} to itself")
    return norm, views


def _is_other_shape(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node is `source` in another shape, without a copy."""
    if not ir.is_call(node, VIEW | RESHAPE) or node.kwargs or view_source(node) is not source:
        return False
    return ir.dtype_of(node) == ir.dtype_of(source)


def _summand(all_reduce: fx.Node) -> fx.Node:
    """Return what is added up."""
    x = all_reduce.args[0]
    assert isinstance(x, fx.Node), x
    return x


def _check_memory(all_reduce: fx.Node, norm: fx.Node, context: PassContext) -> None:
    """Raise `NoMatch` unless what is added up has memory of its own, made in the piece of `norm`, that only
    `all_reduce` reads."""
    reader, node = all_reduce, _summand(all_reduce)
    while True:
        if node.op not in ("call_function", "call_method"):
            raise NoMatch(f"{node} is an input of the graph, which the sum would overwrite")
        sources = may_return(node)
        is_new = not sources  # then the items of a tuple are tensors of their own, too
        others = [str(user) for user in node.users if user is not reader]
        if others and (ir.is_tensor(node) or not is_new):
            raise NoMatch(f"{node}, which the sum would overwrite, is read by {', '.join(others)}, too")
        if is_new:
            break
        if len(sources) > 1:
            shared = " or ".join(map(str, sources))
            raise NoMatch(f"{node} may be the memory of {shared}, which the sum would overwrite")
        reader, node = node, sources[0]
    while node is not norm:
        if context.is_split_op(node):
            raise NoMatch(f"the graph is cut at {node}, between what is added up and {norm}")
        node = node.next


def _fuse(graph: fx.Graph, all_reduce: fx.Node, views: list[fx.Node], norm: fx.Node) -> None:
    """Replace the sum, its views and `norm` by one op, which has the same results as `norm`."""
    x, added = _summand(all_reduce), views[-1] if views else all_reduce
    for view in views:
        assert isinstance(view.target, str) or callable(view.target), view
        x = ir.insert_call(graph, norm, view.target, x, *view.args[1:])
    residual = norm.args[1] if norm.args[0] is added else norm.args[0]
    fused = ir.insert_call(graph, norm, FUSED[norm.target], x, residual, *norm.args[2:])
    norm.replace_all_uses_with(fused)
    for node in (norm, *reversed(views), all_reduce):
        graph.erase_node(node)
