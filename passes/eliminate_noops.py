"""`eliminate-noops`: what returns its input, and what was computed before, leaves the graph. Runs first.

The passes after it meet fewer spellings of one thing, a piece has fewer inputs, and eager pieces fewer calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from piecegraph.passes.effects import CLONE, DIV, Memory, erase_dead, is_pure, same_stride, viewed
from piecegraph.passes.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.repeated_values import merge_repeated_values
from piecegraph.passes.single_products import multiply_single_products
from piecegraph.passes.torch_ir import (
    ADD,
    CASTS,
    MUL,
    SUB,
    is_call,
    is_tensor,
    number,
    operands,
    same_shape,
    value_of,
)


@dataclass(frozen=True, slots=True)
class EliminateNoops(GraphPass):
    """Bitwise; multiplications as `single_products` says. Matches are nodes removed, and matmuls that became such:

    - casts, views, slices, expands and `contiguous` that return the tensor they are given, dropout that drops
      nothing, and chains of views that end where they began;
    - copies (`clone`, `x * 1.0`, `x - 0`) of memory nobody writes to, whose own is no output;
    - calls equal to one before (`repeated_values`);
    - pure nodes nobody reads;
    - matmuls of one column and one row (`single_products`).

    Sizes and strides are compared as expressions: equal for every size, or not equal.
    """

    name: ClassVar[str] = "eliminate-noops"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        before = len(graph.nodes)
        split_ops = [node for node in graph.nodes if context.is_split_op(node)]
        misses = [*_drop_views(graph), *_drop_copies(graph)]
        erase_dead(graph, keep=split_ops)  # before values are compared: who reads what decides there
        misses += merge_repeated_values(graph, context)
        erase_dead(graph, keep=split_ops)
        removed = before - len(graph.nodes)
        return PassResult(matches=removed + multiply_single_products(graph, keep=split_ops), misses=tuple(misses))


def _drop_views(graph: fx.Graph) -> list[Miss]:
    """Memory is shared either way, so what is written where does not matter."""
    misses = []
    for node in graph.nodes:
        found = None
        source = viewed(node)
        while source is not None:
            if _is_same_tensor(node, source) and value_of(node).storage_offset() == value_of(source).storage_offset():
                found = source
            source = viewed(source)
        if found is None or not node.users or not is_pure(node):
            continue
        if _is_output(node) and (found.op == "placeholder" or _is_output(found)):
            misses.append(Miss(node.name, f"an output, and {found.name} is one or an input: they would be one object"))
            continue
        node.replace_all_uses_with(found)
    return misses


def _drop_copies(graph: fx.Graph) -> list[Miss]:
    misses = []
    memory = Memory(graph)
    for node in graph.nodes:
        source = _copied(node)
        if source is None or not node.users or not _is_same_tensor(node, source):
            continue
        if memory.is_written(node) or memory.is_written(source):
            misses.append(Miss(node.name, f"a copy of {source.name}, and one of the two is changed in place"))
        elif memory.is_held_outside(node):
            misses.append(Miss(node.name, f"a copy of {source.name} that is an output: it needs memory of its own"))
        else:
            node.replace_all_uses_with(source)
    return misses


def _copied(node: fx.Node) -> fx.Node | None:
    """The tensor with whose numbers a call fills new memory."""
    if not is_tensor(node):
        return None
    if is_call(node, CLONE) or (is_call(node, CASTS) and (node.kwargs.get("copy") or True in node.args)):
        return node.args[0] if is_tensor(node.args[0]) else None
    for spellings, neutral, commutes in ((MUL, _is_one, True), (DIV, _is_one, False)):
        if (found := _other_than(node, spellings, neutral, commutes)) is not None:
            return found
    # -0.0 + 0.0 is 0.0, so of the zeros only -0.0 adds nothing, and only 0.0 takes nothing away
    integral = not value_of(node).is_floating_point()
    found = _other_than(node, ADD, lambda x: x == 0 and (integral or math.copysign(1, x) < 0), True)
    return found or _other_than(node, SUB, lambda x: x == 0 and (integral or math.copysign(1, x) > 0), False)


def _is_one(x: float) -> bool:
    return x == 1


def _other_than(node: fx.Node, spellings: frozenset[object], is_neutral: object, commutes: bool) -> fx.Node | None:
    """The operand of a call whose other operand is a number that changes nothing."""
    both = operands(node, spellings)
    if both is None:
        return None
    for tensor, constant in (both, both[::-1]) if commutes else (both,):
        value = number(constant)
        if is_tensor(tensor) and value is not None and is_neutral(value):  # type: ignore[operator]
            return tensor
    return None


def _is_same_tensor(node: fx.Node, source: fx.Node) -> bool:
    """Dtype, device, sizes and strides agree, whatever symbols stand for."""
    one, other = value_of(node), value_of(source)
    return (
        (one.dtype, one.device, one.layout, type(one) is type(other)) == (other.dtype, other.device, other.layout, True)
        and not one.dtype.is_complex
        and same_shape(node, source)
        and all(map(_same_step, one.shape, one.stride(), other.stride()))
    )


def _same_step(size: object, one: object, other: object) -> bool:
    """Two strides of a dim of `size` agree; that of a dim of one is never used."""
    return (isinstance(size, int) and size == 1) or same_stride(one, other)


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
