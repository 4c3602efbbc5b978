"""`fuse-act-mul`: fuse the gated activation of an MLP, `act(gate) * up`, into one op over the merged projection.

The pass works on the output of `merge-projections`, or on a model that stores gate and up as one weight (Phi-3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.act_mul import ACT_MUL


@dataclass(frozen=True)
class FuseActMul(GraphPass):
    """A pass that replaces `act(gate) * up` by `piecegraph::act_mul`.

    A site is `silu` or `gelu` of columns `[a, a + n)` of a tensor, times columns `[a + n, a + 2n)` of the same tensor.
    An activation that multiplies no tensor of its shape is not a site.

    The fused op rounds once where torch rounds the activation too, so results differ in their last bit.
    """

    name: ClassVar[str] = "fuse-act-mul"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for act in [node for node in graph.nodes if is_gate(node)]:
            try:
                gated = gated_by(act)
            except NoMatch as reason:
                misses.append(Miss(act.name, str(reason)))
                continue
            _fuse(graph, gated)
            matches += 1
        return PassResult(matches, tuple(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """A match: `result = activation(gate) * up`, where gate and up are the halves of `both`."""

    activation: str
    both: ir.Columns
    result: fx.Node
    inner: tuple[fx.Node, ...]


def is_gate(node: fx.Node) -> bool:
    """Return whether a node is an activation that multiplies a tensor of its shape."""
    return ir.is_call(node, ir.SILU | ir.GELU) and ir.is_tensor(node) and any(map(_product_with(node), node.users))


def _product_with(act: fx.Node) -> Any:
    """Return a predicate that is true for readers of `act` that multiply it by a tensor of its shape."""

    def is_product(reader: fx.Node) -> bool:
        up = ir.other_operand(reader, ir.MUL, act)
        return ir.is_tensor(up) and ir.same_shape(up, act)

    return is_product


def gated_by(act: fx.Node) -> Gated:
    """Return the gated activation around `act`, an activation. Raises `NoMatch`."""
    if len(act.users) > 1:
        raise NoMatch(f"it has a second reader: {', '.join(user.name for user in act.users)}")
    (product,) = act.users
    gate, up = act.args[0], ir.other_operand(product, ir.MUL, act)
    if not ir.dtype_of(act) == ir.dtype_of(up) == ir.dtype_of(product):
        raise NoMatch(f"{act} is {ir.dtype_of(act)} and {up} is {ir.dtype_of(up)}; wanted is one dtype")
    if not ir.dtype_of(act).is_floating_point or ir.dtype_of(act).itemsize > 4:
        raise NoMatch(f"{act} is {ir.dtype_of(act)}; wanted is float32 or shorter")
    both = _halves(gate, up)
    if (changed := changed_between(act, product, (both.source,))) is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {product} is there")
    return Gated(
        activation=_activation(act),
        both=both,
        result=product,
        inner=(act, product, *_parts(gate), *_parts(up)),
    )


def _activation(act: fx.Node) -> str:
    """Return the activation's name in `ACTIVATIONS`. Raises `NoMatch` if there is none."""
    if ir.is_call(act, ir.SILU):
        if ir.argument(act, 1, "inplace", False):
            raise NoMatch("it works in place")
        return "silu"
    approximate = ir.argument(act, 1, "approximate", "none")
    if approximate not in ("none", "tanh"):
        raise NoMatch(f"its approximation is {approximate!r}; wanted is 'none' or 'tanh'")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _halves(gate: Any, up: Any) -> ir.Columns:
    """Return the columns that hold `gate` and, right after it, `up`. Raises `NoMatch`."""
    first, second = ir.columns_of(gate), ir.columns_of(up)
    if first is None or second is None or first.source is not second.source:
        raise NoMatch(f"gate {gate} and up {up} are not slices of one tensor: are their projections merged?")
    where = f"gate is columns {first.start}:{first.stop} of {first.source}, up is {second.start}:{second.stop}"
    if second.stop == first.start:
        raise NoMatch(f"{where}; wanted is gate first")
    if first.stop != second.start or first.stop - first.start != second.stop - second.start:
        raise NoMatch(f"{where}; wanted are halves side by side")
    return ir.Columns(first.source, first.start, second.stop)


def _parts(half: Any) -> list[fx.Node]:
    """Return the nodes of one half: the half, and the chunk or split that it is an item of."""
    source = half.args[0]
    return [half] if ir.is_tensor(source) else [half, source]


def _fuse(graph: fx.Graph, gated: Gated) -> None:
    gate_up = ir.insert_columns(graph, gated.result, gated.both)
    fused = ir.insert_call(graph, gated.result, ACT_MUL, gate_up, gated.activation)
    gated.result.replace_all_uses_with(fused)
    ir.erase_unread(graph, gated.inner)
