"""Keep what a piece returns, and what it writes, apart from the memory that it writes.

Inductor removes a copy whose source is a value of the graph, and later computes that value in the memory of an input
that the piece writes. Each step is right by itself. Together they make the output share the input's memory, so that it
has what was written last and not what was copied (`tests/compiler/inductor/test_written_inputs.py` has the programs).
Here every output of a graph that writes an input is copied after the first step and before the second; Inductor makes
the copy a part of the kernel that computes the value.

The same two steps make `x[1:] = x[:-1].clone()` a write from a view of `x` into `x` itself, which reads what it has
written already. What a write takes from the memory it writes is copied here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from piecegraph.compiler.inductor.custom_pass import POST_GRAD_OPTION, custom_graph_pass
from piecegraph.passes.ops.op_types import OpOverload

_UUID = "piecegraph: copies of outputs where an input is written, and of what overlaps with a write, 1"

_WRITES_INTO_THE_FIRST = frozenset(
    {
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
    }
)
"""The functional ops that Inductor computes in the memory of their first argument where nothing else reads it later."""


def with_outputs_apart(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's options with `copy_outputs` and `copy_overlaps` run after the pass that they name, if any."""
    named = options.get(POST_GRAD_OPTION)
    if named is None:
        return {**options, POST_GRAD_OPTION: custom_graph_pass(_copy, _UUID)}

    def both(graph: fx.Graph) -> None:
        named(graph)
        _copy(graph)

    uuid = named.uuid() if hasattr(named, "uuid") else None
    return {**options, POST_GRAD_OPTION: custom_graph_pass(both, uuid and f"{uuid}-{_UUID}")}


def _copy(graph: fx.Graph) -> None:
    copy_outputs(graph)
    copy_overlaps(graph)


def copy_overlaps(graph: fx.Graph) -> None:
    """Copy, in place in `graph`, each tensor that is written into memory of which it is a view.

    A view of an input is copied also where it is written into another input, which may be written into the first.
    """
    written = {node.args[0] for node in graph.nodes if _writes_an_input(node)}
    for node in list(graph.nodes):
        if node.target in _WRITES_INTO_THE_FIRST:
            taken_from = {_maker(node.args[0])}
        elif _writes_an_input(node):
            taken_from = written
        else:
            continue
        for each in dict.fromkeys(each for part in node.args[1:] for each in pytree.tree_leaves(part)):
            if isinstance(each, fx.Node) and _maker(each) in taken_from:
                with graph.inserting_after(each):
                    copied = graph.call_function(torch.ops.aten.clone.default, (each,))
                copied.meta["val"] = each.meta["val"].clone()
                rest = pytree.tree_map(lambda arg, old=each, new=copied: new if arg is old else arg, node.args[1:])
                node.args = (node.args[0], *rest)


def copy_outputs(graph: fx.Graph) -> None:
    """Copy, in place in `graph`, each tensor that Inductor's functional graph returns, if the graph writes an input."""
    output = graph.output_node()
    written = {node for node in graph.nodes if _writes_an_input(node)}
    if not written:
        return
    made = dict.fromkeys(_maker(node) for node in output.all_input_nodes if node not in written)
    for node in made:
        if node.op == "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_after(node):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta["val"] = node.meta["val"].clone()
        _replace_in_outputs(output, node, copied)


def _replace_in_outputs(output: fx.Node, node: fx.Node, copied: fx.Node) -> None:
    """Make the outputs, and the views between them and `node`, read `copied` instead."""
    for user in list(node.users):
        if user is output or (_is_view(user) and user is not copied):
            user.replace_input_with(node, copied)


def _writes_an_input(node: fx.Node) -> bool:
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op in ("placeholder", "get_attr")
    )


def _maker(node: fx.Node) -> fx.Node:
    """Return the node whose result `node` is, or is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view
