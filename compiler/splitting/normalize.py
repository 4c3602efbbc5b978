"""Simplify Dynamo's graph before it is cut: every remaining node computes something, and all inputs are explicit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.size_conditions import SizeCondition
from piecegraph.compiler.common.split_ops import op_name
from piecegraph.passes.matching.effects import is_pure
from piecegraph.passes.matching.torch_ir import value_of

IsSplitOp = Callable[[fx.Node], bool]

_ASSERTS = frozenset({"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"})


def normalize(
    graph_module: fx.GraphModule, is_split_op: IsSplitOp, declared: frozenset[str]
) -> tuple[dict[str, torch.Tensor], tuple[SizeCondition, ...]]:
    """Rewrite the graph in place; the number of split ops stays as it was.

    - tensors held by the module become placeholders, returned as {placeholder name: tensor};
    - assertions about sizes alone (symbols named in `declared`) leave the graph, returned as
      conditions that must hold: they are evaluated once per combination of sizes;
    - items of a tuple are taken where the tuple is made, so that only tensors cross a cut;
    - sizes read off tensors become the size inputs they equal;
    - nodes without readers and without effects are dropped.
    """
    graph = graph_module.graph
    split_ops_before = sum(map(is_split_op, graph.nodes))
    constants = _lift_tensors(graph_module)
    conditions = _take_size_assertions(graph, declared)
    _use_size_inputs(graph)
    _hoist_items(graph)
    _drop_dead(graph, is_split_op)
    graph.lint()
    split_ops_after = sum(map(is_split_op, graph.nodes))
    assert split_ops_before == split_ops_after, f"normalizing lost split ops: {split_ops_before} -> {split_ops_after}"
    graph_module.recompile()
    return constants, conditions


def symbol_of(value: Any) -> str | None:
    """Return the name of the symbol if `value` is a SymInt of one symbol and not an expression; else None."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
        return str(value.node.expr)
    return None


def symbols_of(value: Any) -> set[str]:
    """Return the names of the symbols in a size, a condition on sizes or a plain number."""
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return {str(symbol) for symbol in value.node.expr.free_symbols}
    return set()


def _lift_tensors(graph_module: fx.GraphModule) -> dict[str, torch.Tensor]:
    graph = graph_module.graph
    constants: dict[str, torch.Tensor] = {}
    placeholder_of: dict[int, fx.Node] = {}
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(graph_module)
        if not isinstance(value, torch.Tensor):
            continue  # a subgraph of a higher-order op
        placeholder = placeholder_of.get(id(value))
        if placeholder is None:
            at = graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes)))
            with at:
                placeholder = graph.placeholder("constant_" + str(node.target).replace(".", "_"))
            placeholder.meta.update(node.meta)
            placeholder_of[id(value)] = last = placeholder
            constants[placeholder.name] = value
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
    return constants


def _take_size_assertions(graph: fx.Graph, declared: frozenset[str]) -> tuple[SizeCondition, ...]:
    taken = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        name = op_name(node.target)
        if name in _ASSERTS or node.target in (torch._check, torch._check_is_size):
            condition = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            if not isinstance(condition, torch.SymBool | torch.SymInt) or not symbols_of(condition) <= declared:
                continue  # about data, not about declared sizes: stays
            if isinstance(condition, torch.SymBool):
                taken.append(SizeCondition.from_sympy(condition.node.expr))
            graph.erase_node(node)
    return tuple(taken)


def _use_size_inputs(graph: fx.Graph) -> None:
    """Replace each node whose value is exactly a declared size by that size's placeholder."""
    inputs = {symbol_of(value_of(node)): node for node in graph.nodes if node.op == "placeholder"}
    inputs.pop(None, None)
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_method") and (symbol := symbol_of(value_of(node))) in inputs:
            node.replace_all_uses_with(inputs[symbol])


def _hoist_items(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            producer = node.args[0]
            if isinstance(value_of(producer), tuple | list) and isinstance(node.args[1], int):
                at = producer
                while (
                    at.next.op == "call_function" and at.next.target is operator.getitem and at.next.args[0] is producer
                ):
                    at = at.next
                if producer.op != "placeholder" and at is not node:
                    at.append(node)


def _drop_dead(graph: fx.Graph, is_split_op: IsSplitOp) -> None:
    for node in reversed(list(graph.nodes)):
        if (
            not node.users
            and node.op != "placeholder"
            and node.op != "output"
            and not is_split_op(node)
            and is_pure(node)
        ):
            graph.erase_node(node)
