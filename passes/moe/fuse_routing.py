"""`fuse-routing`: a softmax over experts, the choice of the largest, and their weights become one op.

Torch has six kernels for this, none of which starts before the preceding one has ended.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.moe.routing import ROUTE_TOKENS

SOFTMAX = frozenset({F.softmax, torch.softmax, "softmax"})
TOPK = frozenset({torch.topk, "topk"})
DIVISION = frozenset({operator.truediv, operator.itruediv, torch.div, "div", "div_"})
SUM = frozenset({torch.sum, "sum"})

MAX_EXPERTS = 4096
"""The most experts among which a program of the kernel chooses."""


@dataclass(frozen=True, slots=True)
class FuseRouting(GraphPass):
    """A pass that replaces a token's choice of experts by `piecegraph::route_tokens`.

    A site is `topk` of a softmax, over the last of two dims. The division of what is chosen by its sum, and a cast
    behind it, become part of the op if they are there.
    """

    name: ClassVar[str] = "fuse-routing"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches, misses = 0, []
        for topk in [node for node in graph.nodes if ir.is_call(node, TOPK) and ir.is_call(_input(node), SOFTMAX)]:
            try:
                choice = _choice(topk)
            except NoMatch as why:
                misses.append(Miss(topk.name, str(why)))
                continue
            _replace(graph, choice)
            matches += 1
        return PassResult(matches=matches, misses=tuple(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The operands of `route_tokens`, and the nodes that it replaces."""

    logits: fx.Node
    top_k: int
    is_normalised: bool
    weights: fx.Node
    ids: fx.Node | None
    inner: tuple[fx.Node, ...]


def _choice(topk: fx.Node) -> _Choice:
    """Return the choice that ends with `topk`, its division and its cast. Raises `NoMatch`."""
    softmax = _input(topk)
    logits = _logits(softmax)
    first = softmax
    while _input(first) is not logits:  # a cast that copies them
        first = _input(first)
    if (changed := changed_between(first, topk, (logits,))) is not None:
        raise NoMatch(f"{changed[0]} is changed in place by {changed[1]}, before {topk.name} is there")
    top_k = ir.argument(topk, 1, "k")
    if not _is_last(ir.argument(topk, 2, "dim", -1)) or not ir.argument(topk, 3, "largest", True):
        raise NoMatch(f"{topk.name} does not take the largest of the last dim")
    if not isinstance(top_k, int) or len(softmax.users) > 1:
        raise NoMatch(f"{softmax.name} is read by others than {topk.name}, or how many it takes is no constant")
    items: dict[Any, fx.Node] = {user.args[1]: user for user in topk.users if ir.is_call(user, ir.GETITEM)}
    if len(items) != len(topk.users) or 0 not in items:
        raise NoMatch(f"what reads {topk.name} are not its values and its indices, each once")
    weights, inner = items[0], [topk, softmax, *items.values()]
    normalised = _divided_by_sum(weights)
    if normalised is not None:
        inner += [*weights.users, normalised]
        weights = normalised
    if len(weights.users) == 1:
        (cast,) = weights.users
        if ir.cast_source(cast) is weights and ir.dtype_of(cast).is_floating_point:
            inner.append(cast)
            weights = cast
    return _Choice(
        logits=logits,
        top_k=top_k,
        is_normalised=normalised is not None,
        weights=weights,
        ids=items.get(1),
        inner=tuple(inner),
    )


def _logits(softmax: fx.Node) -> fx.Node:
    """Return what the softmax is over, before casts to wider floats. Raises `NoMatch`."""
    logits = _input(softmax)
    shape = ir.shape_of(softmax)
    if not ir.is_tensor(logits) or ir.dtype_of(softmax) != torch.float32:
        raise NoMatch(f"{softmax.name} is {ir.dtype_of(softmax)}; wanted is float32")
    if len(shape) != 2 or not _is_last(ir.argument(softmax, 1, "dim")):
        raise NoMatch(f"{softmax.name} is not over the last of two dims")
    if not isinstance(shape[-1], int) or shape[-1] > MAX_EXPERTS:
        raise NoMatch(f"{softmax.name} is over {shape[-1]} experts; at most {MAX_EXPERTS} are taken")
    narrow = ir.strip_widening(logits)
    if not ir.is_widening(ir.dtype_of(narrow), torch.float32):
        raise NoMatch(f"{narrow.name} is {ir.dtype_of(narrow)}; wanted is float32 or shorter")
    return narrow


def _input(node: fx.Node) -> Any:
    return ir.argument(node, 0, "input")


def _is_last(dim: Any) -> bool:
    return dim in (-1, 1)


def _divided_by_sum(weights: fx.Node) -> fx.Node | None:
    """Return `weights / weights.sum(-1, keepdim=True)` if nothing else reads `weights`; else None."""
    for division in weights.users:
        if not ir.is_call(division, DIVISION) or division.kwargs or len(division.args) != 2:
            continue
        dividend: Any
        total: Any
        dividend, total = division.args
        is_own_sum = (
            dividend is weights
            and ir.is_call(total, SUM)
            and _input(total) is weights
            and _is_last(ir.argument(total, 1, "dim"))
            and ir.argument(total, 2, "keepdim", False) is True
            and ir.dtype_of(total) == torch.float32
        )
        if is_own_sum and set(weights.users) == {division, total} and set(total.users) == {division}:
            return division
    return None


def _replace(graph: fx.Graph, choice: _Choice) -> None:
    topk = choice.inner[0]
    operands = (choice.logits, choice.top_k, choice.is_normalised, ir.dtype_of(choice.weights))
    fused = ir.insert_call(graph, topk, ROUTE_TOKENS, *operands)
    for index, node in ((0, choice.weights), (1, choice.ids)):
        if node is not None:
            node.replace_all_uses_with(ir.insert_call(graph, topk, operator.getitem, fused, index))
    ir.erase_unread(graph, choice.inner)
