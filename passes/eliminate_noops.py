"""`eliminate-noops`: remove calls that return their input or repeat an earlier call. Runs first.

The passes after it meet fewer spellings of one thing, a piece has fewer inputs, and eager pieces have fewer calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from piecegraph.passes.matching.effects import CLONE, DIV, Memory, erase_dead, is_pure, same_stride, view_source
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.repeated_values import merge_repeated_values
from piecegraph.passes.matching.single_products import multiply_single_products
from piecegraph.passes.matching.torch_ir import (
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
    """A pass that removes calls without effect. A match is a node that is removed, or a matmul that is replaced.

    The result is the same bit for bit; `single_products` has the exception for multiplications. Removed are:

    - casts, views, slices, expands and `contiguous` that return the tensor they are given, dropout that drops
      nothing, and chains of views that end where they began;
    - copies (`clone`, `x * 1.0`, `x - 0`) of memory that no call writes to, unless the copy is an output;
    - calls equal to an earlier one (`repeated_values`);
    - pure nodes that no call reads;
    - matmuls of one column and one row, which become multiplications (`single_products`).

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
    """Replace views by the tensor they equal.

    The view and the tensor share memory either way, so writes in place do not matter.
    """
    misses = []
    for node in graph.nodes:
        found = None
        source = view_source(node)
        while source is not None:
            if _is_same_tensor(node, source) and value_of(node).storage_offset() == value_of(source).storage_offset():
                found = source
            source = view_source(source)
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
    """Return the tensor whose numbers a call copies into new memory, or None."""
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
    """Return the operand of a call whose other operand is a neutral number, or None."""
    both = operands(node, spellings)
    if both is None:
        return None
    for tensor, constant in (both, both[::-1]) if commutes else (both,):
        value = number(constant)
        if is_tensor(tensor) and value is not None and is_neutral(value):  # type: ignore[operator]
            return tensor
    return None


def _is_same_tensor(node: fx.Node, source: fx.Node) -> bool:
    """Return whether dtype, device, sizes and strides agree for all values of the symbols."""
    one, other = value_of(node), value_of(source)
    return (
        (one.dtype, one.device, one.layout, type(one) is type(other)) == (other.dtype, other.device, other.layout, True)
        and not one.dtype.is_complex
        and same_shape(node, source)
        and all(map(_same_step, one.shape, one.stride(), other.stride()))
    )


def _same_step(size: object, one: object, other: object) -> bool:
    """Return whether two strides of a dim of `size` agree. The stride of a dim of one is never used."""
    return (isinstance(size, int) and size == 1) or same_stride(one, other)


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
