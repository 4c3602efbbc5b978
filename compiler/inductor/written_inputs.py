"""Keep what a piece returns apart from the inputs that it writes.

Inductor removes a copy whose source is a value of the graph, and later computes that value in the memory of an input
that the piece writes. Each step is right by itself. Together they make the output share the input's memory, so that it
has what was written last and not what was copied (`tests/compiler/inductor/test_written_inputs.py` has the programs).
Here every output of a graph that writes an input is copied after the first step and before the second; Inductor makes
the copy a part of the kernel that computes the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.inductor.custom_pass import POST_GRAD_OPTION, custom_graph_pass
from piecegraph.passes.ops.op_types import OpOverload

_UUID = "piecegraph: copies of outputs where an input is written, 1"


def with_outputs_apart(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's options with `copy_outputs` run after the pass that they name, if any."""
    named = options.get(POST_GRAD_OPTION)
    if named is None:
        return {**options, POST_GRAD_OPTION: custom_graph_pass(copy_outputs, _UUID)}

    def both(graph: fx.Graph) -> None:
        named(graph)
        copy_outputs(graph)

    uuid = named.uuid() if hasattr(named, "uuid") else None
    return {**options, POST_GRAD_OPTION: custom_graph_pass(both, uuid and f"{uuid}-{_UUID}")}


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
