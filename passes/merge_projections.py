"""`merge-projections`: merge linears that read the same tensor into one matmul over one stored weight.

The linears are query, key and value of an attention layer, or gate and up of an MLP. One larger matmul reads the same
bytes with fewer launches and fuller tiles. The pass works on the traced graph, before it is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between
from piecegraph.passes.matching.foreign_ops import relies_on_strides
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.grouped_linear import GROUPED_LINEAR
from piecegraph.passes.ops.quantised.int4_tiles_linear import INT4_TILES_LINEAR
from piecegraph.passes.ops.quantised.int8_inputs_linear import INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR

ALIGNMENT = 8
"""The multiple of which the columns of bfloat16 and float16 have to be, since fast kernels read 16 bytes at a time.

With a shared expert's gate, a linear of one column, the router and the expert merged with it would get the slowest of
the library's kernels: 0.65 ms for 8,192 rows where the others take 0.07.
"""


@dataclass(frozen=True, slots=True)
class MergeProjections(GraphPass):
    """A pass that merges groups of linears over the same input.

    A group is two linears or more with no split op between them. Their weights `[out, in]` are weights
    (`PassContext.is_weight`) that nothing else reads, of one dtype and device, and of columns that `ALIGNMENT` divides
    if they have 2 bytes; all have a bias or none has. Weights of our quantised linears, such as
    `piecegraph::int8_linear`, are merged with their scales. Each linear's output becomes columns of the merged output:
    a view, or a contiguous copy of it if an op that is not torch's reads it and may rely on strides (`foreign_ops`).
    """

    name: ClassVar[str] = "merge-projections"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        groups, misses = _groups(graph, context)
        for group in groups:
            _merge(graph, group, context)
        return PassResult(matches=len(groups), misses=misses)


_QUANTISED = (INT8_LINEAR, INT8_INPUTS_LINEAR, GROUPED_LINEAR, FP8_LINEAR, INT4_TILES_LINEAR)

_LINEARS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(ir.LINEAR, ("input", "weight", "bias")),
    **dict.fromkeys(_QUANTISED, ("x", "weight", "scale", "bias")),
}
"""The calls that are merged, with the names of their tensors. Each tensor but the first has a row, or a number, for
each output column, or for each block of as many columns as `block` says."""

_CONSTANTS: dict[Any, tuple[str, ...]] = {FP8_LINEAR: ("block", "input_group")}
"""The arguments after the tensors, which merged calls share."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear, such as `node = linear(x, weight, bias)`."""

    node: fx.Node
    x: Any
    tensors: dict[str, Any]  # the other tensors by name; a bias may be None
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> _Linear:
        x, *names = _LINEARS[node.target]
        tensors = {name: ir.argument(node, at, name) for at, name in enumerate(names, start=1)}
        after = enumerate(_CONSTANTS.get(node.target, ()), start=1 + len(names))
        constants = tuple(ir.argument(node, at, name) for at, name in after)
        return cls(
            node, ir.argument(node, 0, x), tensors, tuple(tuple(c) if isinstance(c, list) else c for c in constants)
        )

    def kind(self, context: PassContext) -> tuple[object, ...]:
        """Return a value that is equal for linears that can be merged. Raises `NoMatch` if this one cannot."""
        if self.node.target is INT4_TILES_LINEAR:
            raise NoMatch("its scales lie group by group for the CPU's kernel, and weights are joined by rows only")
        own = {name: node for name, node in self.tensors.items() if node is not None}
        for what, node in own.items():
            if not isinstance(node, fx.Node) or not context.is_weight(node):
                raise NoMatch(f"its {what} {node} is not a parameter that owns its memory")
            if list(node.users) != [self.node]:
                readers = ", ".join(user.name for user in node.users)
                raise NoMatch(f"its {what} {node} has more than one reader: {readers}")
        values = [ir.value_of(node) for node in own.values()]
        block = self.constants[0][0] if self.constants else 1
        rows = {
            name: value.shape[0] * (block if name == "scale" else 1) for name, value in zip(own, values, strict=True)
        }
        is_plain = self.node.target in ir.LINEAR
        if len(set(rows.values())) > 1 or (is_plain and [value.ndim for value in values] != [2, 1][: len(values)]):
            raise NoMatch(
                f"its {' and '.join(self.tensors)} have the shapes {[tuple(value.shape) for value in values]}"
            )
        weight = ir.value_of(self.tensors["weight"])
        if is_plain and weight.element_size() == 2 and weight.shape[0] % ALIGNMENT:
            raise NoMatch(f"with its {weight.shape[0]} columns, merged rows are no multiple of {ALIGNMENT} numbers")
        call = "linear" if is_plain else self.node.target
        kinds = ((value.dtype, value.device, value.shape[1:]) for value in values)
        return (call, tuple(own), self.constants, *kinds)


def _groups(graph: fx.Graph, context: PassContext) -> tuple[list[tuple[_Linear, ...]], tuple[Miss, ...]]:
    groups = []
    misses: dict[fx.Node, Miss] = {}
    for alike in _sites(graph, context):
        by_kind: dict[object, list[_Linear]] = {}
        for linear in alike:
            try:
                by_kind.setdefault(linear.kind(context), []).append(linear)
            except NoMatch as why:
                misses[linear.node] = Miss(linear.node.name, str(why))
        for group in by_kind.values():
            reason = _not_together(group, alike)
            if reason is None:
                groups.append(tuple(group))
            else:
                misses.update({linear.node: Miss(linear.node.name, reason) for linear in group})
    return groups, tuple(misses[node] for node in graph.nodes if node in misses)


def _sites(graph: fx.Graph, context: PassContext) -> Iterable[list[_Linear]]:
    """Return the groups of two linears or more that read the same tensor between two split ops."""
    sites: dict[object, list[_Linear]] = {}
    segment = 0
    for node in graph.nodes:
        segment += context.is_split_op(node)
        if ir.is_call(node, frozenset(_LINEARS)):
            linear = _Linear.of(node)
            sites.setdefault((linear.x, segment), []).append(linear)
    return [site for site in sites.values() if len(site) > 1]


def _not_together(group: list[_Linear], site: list[_Linear]) -> str | None:
    if len(group) == 1:
        others = ", ".join(linear.node.name for linear in site if linear is not group[0])
        return f"of {others}, which read {group[0].x} too, none has its dtype and its bias, or lack of one"
    changed = changed_between(group[0].node, group[-1].node, (group[0].x,))
    return None if changed is None else f"{changed[0]} is changed in place by {changed[1]}, before all of them read it"


def _merge(graph: fx.Graph, group: tuple[_Linear, ...], context: PassContext) -> None:
    first = group[0]
    members = {
        name: [linear.tensors[name] for linear in group] for name, node in first.tensors.items() if node is not None
    }
    together = {name: context.concatenated(nodes) for name, nodes in members.items()}
    tensors = [together.get(name) for name in first.tensors]
    with graph.inserting_before(first.node):
        call: Any = first.node.target
        merged = graph.call_function(call, (first.x, *tensors, *first.constants))
    start = 0
    for linear in group:
        node, size = linear.node, ir.value_of(linear.tensors["weight"]).shape[0]
        with graph.inserting_before(node):
            columns: Any = (Ellipsis, slice(start, start + size))
            part = graph.call_function(operator.getitem, (merged, columns))
            if relies_on_strides(node):
                part = graph.call_method("contiguous", (part,))
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        start += size
    for nodes in members.values():
        for member in nodes:
            graph.erase_node(member)
