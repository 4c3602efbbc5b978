"""`fuse-rope-kv-write`: move the norm and rotary embedding of query and key into attention, which writes the cache.

The pass crosses the cut on purpose: attention becomes an op that takes the projected query and key, and the tables.
Every attention call is a site, so each that does not match is reported as a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import ELEMENTWISE, Memory, view_source
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.repeated_halves import repeat_halves
from piecegraph.passes.matching.rotary_pattern import ATTENTION_LAYOUT, RotatedHeads, rotated_heads
from piecegraph.passes.matching.torch_ir import Columns, NoMatch
from piecegraph.passes.ops.op_types import OpOverload
from piecegraph.passes.rotary.rotary_tables import fuse_rotary_tables

_SIZES = frozenset({"new_empty", "size", torch.ops.aten.sym_size.int})
"""Calls besides attention that may read a rotated tensor, because they read none of its numbers."""


@dataclass(frozen=True)
class FuseRopeKVWrite(GraphPass):
    """A pass that fuses rotary embedding into attention.

    The rotary embedding is half against half, over the first numbers of a head or over all, after an RMS norm of each
    head or none. `attention_op(query, key, value, out, *rest)` becomes `fused_op(query, key, value, out, cos, sin,
    q_norm_weight, k_norm_weight, norm_eps, norm_offset, *rest)`, with query and key `[tokens, heads, dim]` as
    projected. The op may overwrite the query: nothing else may read it.

    The op rounds once where the graph rounds after each step, and takes tables as they were before they were rounded.
    Cosines and sines become one op (`rotary_tables.py`); halves of other tables become repetitions
    (`repeated_halves.py`).
    """

    attention_op: str = "piecegraph::attention"
    fused_op: str = "piecegraph::rope_attention"

    name: ClassVar[str] = "fuse-rope-kv-write"
    replaces_split_ops: ClassVar[bool] = True

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        calls = [node for node in graph.nodes if _op_name(node) == self.attention_op]
        if not calls or not self.is_for(graph):
            return PassResult()
        fused_op, memory = _overload(self.fused_op), Memory(graph)
        tables: dict[fx.Node, fx.Node] = {}
        pairs: dict[tuple[fx.Node, fx.Node], None] = {}
        matches, misses = 0, []
        for call in calls:
            try:
                query, key = (_argument(call, position) for position in range(2))
                if not self.takes(query):
                    continue
                _check_together(query, key)
                _check_query_is_private(query, memory)
                _check_unchanged(query, key, memory)
            except NoMatch as reason:
                misses.append(Miss(call.name, str(reason)))
                continue
            _fuse(graph, call, fused_op, query, key, tables)
            matches += 1
            pairs[query.cos, query.sin] = None
        for cos, sin in pairs:  # behind the last call: what is looked for above is a table as models make it
            is_only_pair = sum(cos in pair or sin in pair for pair in pairs) == 1
            if not (is_only_pair and fuse_rotary_tables(graph, cos, sin)):
                repeat_halves(graph, cos)
                repeat_halves(graph, sin)
        return PassResult(matches, tuple(misses))

    def is_for(self, graph: fx.Graph) -> bool:
        """Return whether any call of the graph is a site."""
        return True

    def takes(self, query: RotatedHeads) -> bool:
        """Return whether the call of a rotated query is a site."""
        return True


def _op_name(node: fx.Node) -> str | None:
    target = node.target
    return str(target._schema.name) if isinstance(target, OpOverload) else None


def _overload(name: str) -> OpOverload:
    namespace, _, op = name.partition("::")
    overload: OpOverload = getattr(getattr(torch.ops, namespace), op).default
    return overload


def _argument(call: fx.Node, position: int) -> RotatedHeads:
    name, node = ("query", "key")[position], call.args[position]
    assert isinstance(node, fx.Node), call
    try:
        found = rotated_heads(node)
        _check_readers(call, found)
    except NoMatch as reason:
        raise NoMatch(f"{name}: {reason}") from None
    return found


def _check_readers(call: fx.Node, found: RotatedHeads) -> None:
    """Raise `NoMatch` if another call reads nodes between projection and attention. Tables may be shared."""
    tables = _derived_from_tables(found.cos, found.sin, found.inner)
    for node in found.inner:
        if node in tables:
            continue
        for reader in _readers(node):
            if reader not in found.inner and reader is not call and not ir.is_call(reader, _SIZES):
                raise NoMatch(f"{node} has a second reader: {reader}")


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a tensor; for a chunk or a split, the readers of its parts."""
    for reader in node.users:
        if ir.is_call(reader, ir.CHUNK | ir.SPLIT):
            yield from reader.users
        else:
            yield reader


def _derived_from_tables(cos: fx.Node, sin: fx.Node, nodes: tuple[fx.Node, ...]) -> set[fx.Node]:
    """Return the `nodes` that are only a table, cast or with another dim."""
    found = {cos, sin}
    while more := {node for node in nodes if node not in found and found.issuperset(node.all_input_nodes)}:
        found |= more
    return found


def _check_together(query: RotatedHeads, key: RotatedHeads) -> None:
    """Raise `NoMatch` unless query and key are normed and rotated alike, since one call does both."""
    if (query.cos, query.sin) != (key.cos, key.sin):
        raise NoMatch(
            f"query is rotated by {query.cos} and {query.sin}, key by {key.cos} and {key.sin}; wanted are the same"
        )
    if (query.norm is None) != (key.norm is None):
        raise NoMatch(f"{'key' if query.norm is None else 'query'} is normed and the other is not")
    if query.norm is not None and key.norm is not None:
        one, other = (query.norm.eps, query.norm.offset), (key.norm.eps, key.norm.offset)
        if one != other:
            raise NoMatch(f"query is normed with (epsilon, offset) {one}, key with {other}; wanted are the same")


def _check_query_is_private(query: RotatedHeads, memory: Memory) -> None:
    """Raise `NoMatch` unless the rows of the projected query may change without another reader noticing."""
    node = query.read.source
    if memory.is_written(node):
        raise NoMatch(f"query: {node} is changed in place by something else")
    if memory.is_held_outside(node):
        raise NoMatch(f"query: {node} may be the memory of an input or an output of the graph")
    columns: Columns | None = query.read
    below: set[fx.Node] = set(query.inner)
    while True:
        for reader in _readers(node):
            if reader not in below and not ir.is_call(reader, _SIZES):
                _check_disjoint(reader, node, columns)
        columns, below = ir.columns_of(node), {node}
        source = _source(node)
        if source is None:
            break
        node = source
    is_new = ir.is_call(node, ir.LINEAR | ELEMENTWISE) or (
        isinstance(node.target, OpOverload)
        and all(argument.alias_info is None for argument in node.target._schema.arguments)
    )
    if not is_new:
        raise NoMatch(f"query: {node} may return memory that something else reads")


def _source(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which a node is a part, a view or a cast, or None."""
    columns = ir.columns_of(node)
    return columns.source if columns is not None else view_source(node) or ir.cast_source(node)


def projection_of(query: RotatedHeads) -> fx.Node:
    """Return the call that computes a query, most often that of a linear."""
    node = query.read.source
    while (source := _source(node)) is not None:
        node = source
    return node


def _check_unchanged(query: RotatedHeads, key: RotatedHeads, memory: Memory) -> None:
    """Raise `NoMatch` if anything writes in place to a tensor that the op reads later than the graph did.

    The query is checked by `_check_query_is_private`.
    """
    weights = [heads.norm.weight for heads in (query, key) if heads.norm is not None and heads.norm.weight is not None]
    for node in (key.read.source, key.cos, key.sin, *weights):
        if memory.is_written(node):
            raise NoMatch(f"{node} is changed in place by something else")


def _check_disjoint(reader: fx.Node, source: fx.Node, columns: Columns | None) -> None:
    """Raise `NoMatch` unless `reader` reads only columns of `source` other than `columns`."""
    read = ir.columns_of(reader)
    if columns is None or read is None or not (read.stop <= columns.start or columns.stop <= read.start):
        raise NoMatch(f"query: {source} has a second reader: {reader}")


def _fuse(
    graph: fx.Graph,
    call: fx.Node,
    fused_op: OpOverload,
    query: RotatedHeads,
    key: RotatedHeads,
    tables: dict[fx.Node, fx.Node],
) -> None:
    old: Any = call.args[:2]
    new = [_projected(graph, before, heads) for before, heads in zip(old, (query, key), strict=True)]
    cos, sin = (_table(graph, node, tables) for node in (query.cos, query.sin))
    norms = [None if heads.norm is None else heads.norm.weight for heads in (query, key)]
    eps, offset = (None, 0.0) if query.norm is None else (query.norm.eps, query.norm.offset)
    with graph.inserting_before(call):
        arguments = (*new, *call.args[2:4], cos, sin, *norms, eps, offset, *call.args[4:])
        graph.call_function(fused_op, arguments).meta["example_value"] = None
    graph.erase_node(call)
    for before, after in zip(old, new, strict=True):
        before.replace_all_uses_with(after)
    left = {*query.inner, *query.views, *key.inner, *key.views}
    cuts = {node.args[0] for node in left if node.args and ir.is_call(node.args[0], ir.CHUNK | ir.SPLIT)}
    ir.erase_unread(graph, left | cuts)


def _projected(graph: fx.Graph, before: fx.Node, found: RotatedHeads) -> fx.Node:
    """Insert and return the heads as projected, `[tokens, heads, dim]`, before `before`."""
    node, layout = ir.insert_columns(graph, before, found.heads), list(found.layout)
    while "one" in layout:
        node = ir.insert_call(graph, before, "squeeze", node, layout.index("one"))
        layout.remove("one")
    if tuple(layout) != ATTENTION_LAYOUT:
        node = ir.insert_call(graph, before, "transpose", node, 0, 1)
    return node


def _table(graph: fx.Graph, node: fx.Node, tables: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the table as `[tokens, rotary_dim]`, made once for all layers, right after the table itself."""
    if len(ir.shape_of(node)) == 2:
        return node
    if node not in tables:
        tables[node] = ir.insert_call(graph, node.next, "squeeze", node, 0)
    return tables[node]
