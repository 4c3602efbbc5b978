"""Replace matmuls of one column and one row, whose sums have a single product each, by multiplications.

Rotary tables are made like this, of frequencies and positions. A matmul is a kernel of the library, before and after
which Inductor has to end its own kernels; a multiplication is fused with its neighbours, such as casts.
"""

from __future__ import annotations

import operator
from collections.abc import Container

import torch
from torch import fx

from piecegraph.passes.matching.effects import same_stride
from piecegraph.passes.matching.torch_ir import insert_call, is_tensor, operands, same_shape, value_of

MATMUL = frozenset({operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__"})


def multiply_single_products(graph: fx.Graph, keep: Container[fx.Node] = ()) -> int:
    """Rewrite matmuls of one column and one row, except for those in `keep`, and return how many there were.

    The bits are the same where a matmul rounds as a product does (not in TF32), except that a zero may have the other
    sign. A matmul whose result would have other strides stays.
    """
    rewritten = 0
    for node in list(graph.nodes):
        both = operands(node, MATMUL)
        if both is None or node in keep or not _is_single_product(node, *both):
            continue
        product = insert_call(graph, node, operator.mul, *both)
        if not _is_alike(product, node):
            graph.erase_node(product)
            continue
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        rewritten += 1
    return rewritten


def _is_single_product(node: fx.Node, column: object, row: object) -> bool:
    if not (is_tensor(node) and is_tensor(column) and is_tensor(row)):
        return False
    one, other = value_of(column), value_of(row)
    if one.ndim < 2 or other.ndim < 2 or not one.is_floating_point():
        return False
    return _is_one(one.shape[-1]) and _is_one(other.shape[-2])


def _is_one(size: object) -> bool:
    """Return whether the size is 1 for every call, not only for the traced one."""
    return isinstance(size, int) and size == 1


def _is_alike(product: fx.Node, node: fx.Node) -> bool:
    found, wanted = value_of(product), value_of(node)
    return (
        (found.dtype, found.device) == (wanted.dtype, wanted.device)
        and same_shape(product, node)
        and all(
            _is_one(size) or same_stride(one, other)
            for size, one, other in zip(wanted.shape, found.stride(), wanted.stride(), strict=True)
        )
    )
