"""Replace `torch.cat` of two equal halves of a rotary table by a repetition.

Inductor makes a kernel for each part that is copied into a result, and ends its fused kernel there. A repetition is
read in place.
"""

from __future__ import annotations

from torch import fx

from piecegraph.passes.matching.torch_ir import CAT, argument, insert_call, is_call, is_last_dim, is_tensor, value_of


def repeat_halves(graph: fx.Graph, table: fx.Node) -> bool:
    """Replace the concatenation of a tensor with itself, from which `table` is computed, by a repetition.

    The bits are the same. Returns whether there was such a concatenation.
    """
    node = table
    while not is_call(node, CAT):
        if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    parts = argument(node, 0, "tensors")
    if not isinstance(parts, list | tuple) or len(parts) != 2 or parts[0] is not parts[1] or not is_tensor(parts[0]):
        return False
    ndim = value_of(parts[0]).ndim
    if not is_last_dim(argument(node, 1, "dim", 0), ndim):
        return False
    repeated = insert_call(graph, node, "repeat", parts[0], *(1,) * (ndim - 1), 2)
    node.replace_all_uses_with(repeated)
    graph.erase_node(node)
    return True
