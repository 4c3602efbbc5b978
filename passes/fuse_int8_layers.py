"""`fuse-int8-layers`: compute all linears between two calls of attention, over int8 weights on a CPU, by one call.

A token of a small model takes milliseconds there, and each call of an op in Python some 10 us: a layer's four linears,
with the norms, sums and the activation between them, become one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.fuse_act_mul import Gated, gated_by, is_gate
from piecegraph.passes.fuse_add_rms_norm import MatchedNorm, is_anchor, norm_at
from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between, is_unmodified_input
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.cpu.int8_layer_linears import INT8_LAYER_LINEARS
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FuseInt8Layers(GraphPass):
    """A pass that replaces the linears between two calls of attention by `piecegraph::int8_layer_linears`.

    A site is every gated activation that an `int8_linear` reads. It matches if what is around it is
    `total = int8_linear(x) + residual`, `result = int8_linear(silu(gate) * up) + total`, where gate and up are the
    halves of `int8_linear(norm(total))`, and `int8_linear(norm(result))`, and nothing else reads what is between these.
    So the pass runs after `merge-projections`, which joins gate and up, and query, key and value. Each norm is rounded
    once where most models round twice, so results may differ in the last bit.
    """

    name: ClassVar[str] = "fuse-int8-layers"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        acts = [node for node in graph.nodes if is_gate(node)]
        matches = 0
        misses = []
        norms: Mapping[fx.Node, MatchedNorm] = _norms(graph) if acts else {}
        for act in acts:
            try:
                gated = gated_by(act)
                if not any(each.target is INT8_LINEAR for each in gated.result.users):
                    continue
                layer = _layer_around(gated, norms)
                _check_between(layer, context)
            except NoMatch as reason:
                misses.append(Miss(act.name, str(reason)))
                continue
            _fuse(graph, layer)
            matches += 1
        return PassResult(matches, tuple(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A match; every node is a call but `residual`, which may be anything."""

    out: fx.Node
    residual: fx.Node
    total: fx.Node
    norm: MatchedNorm
    gate_up: fx.Node
    gated: Gated
    down: fx.Node
    result: fx.Node
    next_norm: MatchedNorm
    next: fx.Node

    @property
    def linears(self) -> tuple[fx.Node, ...]:
        """The linears, in their order."""
        return self.out, self.gate_up, self.down, self.next


def _norms(graph: fx.Graph) -> dict[fx.Node, MatchedNorm]:
    """Return the norms of a graph, by their result and by what they norm."""
    found: dict[fx.Node, MatchedNorm] = {}
    for anchor in [node for node in graph.nodes if is_anchor(node)]:
        try:
            norm = norm_at(anchor)
        except NoMatch:
            continue
        found[norm.result] = found[norm.x] = norm
    return found


def _layer_around(gated: Gated, norms: Mapping[fx.Node, MatchedNorm]) -> _Layer:
    """Return the layer whose activation is `gated`. Raises `NoMatch`."""
    if gated.activation != "silu":
        raise NoMatch(f"the activation is {gated.activation}; the kernel has silu")
    gate_up, down = gated.both.source, _only_reader(gated.result, "the product with the activation")
    _check_linear(gate_up, "gate and up")
    _check_linear(down, "the reader of the product")
    if (gated.both.start, gated.both.stop) != (0, ir.shape_of(gate_up)[-1]):
        raise NoMatch(f"gate and up are columns {gated.both.start}:{gated.both.stop} of {gate_up}, which has others")
    normed = _input_of(gate_up)
    norm = norms.get(normed)
    if norm is None or norm.result is not normed:
        raise NoMatch(f"{gate_up} reads {normed}; wanted is a norm")
    result = _only_reader(down, "the last linear of the MLP")
    if ir.other_operand(result, ir.ADD, down) is not norm.x:
        raise NoMatch(f"{result} is not the sum of {down} and {norm.x}, which is normed before the MLP")
    if not ir.same_shape(down, norm.x):
        raise NoMatch(f"{down} and {norm.x}, whose sum is {result}, differ in their shapes")
    out, residual = _summands(norm.x)
    next_norm = norms.get(result)
    if next_norm is None or next_norm.x is not result:
        raise NoMatch(f"{result} is not normed")
    following = _only_reader(next_norm.result, "the norm behind the MLP")
    _check_linear(following, "the reader of the norm behind the MLP")
    layer = _Layer(
        out=out, residual=residual, total=norm.x, norm=norm, gate_up=gate_up, gated=gated, down=down, result=result,
        next_norm=next_norm, next=following,
    )  # fmt: skip
    _check_readers(layer)
    _check_values(layer)
    return layer


def _summands(total: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the linear and the residual whose sum is `total`. Raises `NoMatch`."""
    both = ir.operands(total, ir.ADD)
    if both is not None:
        for added, residual in (both, both[::-1]):
            if isinstance(added, fx.Node) and added.target is INT8_LINEAR and len(added.users) == 1:
                if not ir.is_tensor(residual) or not ir.same_shape(added, residual):
                    raise NoMatch(f"{added} and {residual}, whose sum is normed, differ in their shapes")
                return added, residual
    raise NoMatch(f"{total}, which is normed before the MLP, is not the sum of an int8 linear that it alone reads")


def _only_reader(node: fx.Node, what: str) -> fx.Node:
    """Return the only reader of a node. Raises `NoMatch`."""
    if len(node.users) != 1:
        raise NoMatch(f"{what}, {node}, has {len(node.users)} readers; wanted is one")
    return next(iter(node.users))


def _check_linear(node: Any, what: str) -> None:
    """Raise `NoMatch` unless a node is an int8 linear whose weights are inputs that nothing changes."""
    if not isinstance(node, fx.Node) or node.target is not INT8_LINEAR:
        raise NoMatch(f"{what}, {node}, is no int8 linear")
    if node.kwargs or len(node.args) != 4:
        raise NoMatch(f"{what}, {node}, has arguments by name")
    for each in node.args[1:]:
        if isinstance(each, fx.Node) and not is_unmodified_input(each):
            raise NoMatch(f"{each}, a weight of {node}, is computed here; wanted is an input that nothing changes")


def _input_of(linear: fx.Node) -> fx.Node:
    x = linear.args[0]
    assert isinstance(x, fx.Node), linear
    return x


def _check_readers(layer: _Layer) -> None:
    """Raise `NoMatch` if anything else reads what is inside of the layer."""
    own = {*layer.norm.inner, layer.norm.result, *layer.gated.inner, *layer.next_norm.inner, layer.next_norm.result}
    own |= {*layer.linears, layer.total, layer.result}
    for node in own - {layer.result, layer.next}:
        if others := [reader.name for reader in node.users if reader not in own]:
            raise NoMatch(f"{node} has other readers: {', '.join(others)}")
    _check_linear(layer.out, "the linear before the MLP")


def _check_values(layer: _Layer) -> None:
    """Raise `NoMatch` for dtypes and weights that the kernel does not read."""
    dtype = ir.dtype_of(layer.total)
    values = (*layer.linears, layer.residual, layer.norm.result, layer.gated.result, layer.result)
    if dtype not in DTYPES or {ir.dtype_of(each) for each in (*values, layer.next_norm.result)} != {dtype}:
        raise NoMatch(f"{layer.total} is {dtype}; wanted is float32 or bfloat16 for it and all of the layer")
    for norm in (layer.norm, layer.next_norm):
        if norm.weight is not None and ir.dtype_of(norm.weight) is not dtype:
            raise NoMatch(f"{norm.weight}, the weight of a norm, is {ir.dtype_of(norm.weight)}; wanted is {dtype}")


def _check_between(layer: _Layer, context: PassContext) -> None:
    """Raise `NoMatch` for a cut inside of the layer, for a weight that is not there before `total`, where the call will
    be, and for an input that is changed in place meanwhile."""
    given = (*(each for linear in layer.linears for each in linear.args[1:]), layer.norm.weight, layer.next_norm.weight)
    weights = tuple(dict.fromkeys(each for each in given if isinstance(each, fx.Node)))
    node = layer.out
    while node is not layer.next:
        if context.is_split_op(node):
            raise NoMatch(f"{node} is a cut between {layer.out} and {layer.next}")
        node = node.next
    behind = layer.total
    while behind is not layer.next:
        if behind in weights:
            raise NoMatch(f"{behind}, a weight, is taken behind {layer.total}; wanted is one that is there before")
        behind = behind.next
    inputs = (_input_of(layer.out), layer.residual, *weights)
    changed = changed_between(layer.out, layer.next, inputs) or changed_between(
        layer.result, layer.next, (layer.result,)
    )
    if changed is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {layer.next} is there")


def _fuse(graph: fx.Graph, layer: _Layer) -> None:
    arguments = [
        layer.out.args[0],
        layer.residual,
        *layer.out.args[1:],
        *(layer.norm.weight, layer.norm.eps, layer.norm.offset),
        *layer.gate_up.args[1:],
        *layer.down.args[1:],
        *(layer.next_norm.weight, layer.next_norm.eps, layer.next_norm.offset),
        *layer.next.args[1:],
    ]
    both = ir.insert_call(graph, layer.total, INT8_LAYER_LINEARS, *arguments)
    after, result = (ir.insert_call(graph, layer.total, operator.getitem, both, index) for index in (0, 1))
    layer.next.replace_all_uses_with(after)
    layer.result.replace_all_uses_with(result)
    inner = (*layer.norm.inner, *layer.gated.inner, *layer.next_norm.inner)
    ir.erase_unread(graph, {*inner, *layer.linears, layer.total, layer.result})
