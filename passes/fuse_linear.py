"""`fuse-linear`: run linears of few rows with our kernels, fused with the norm and the activation around them.

A decode step reads every weight once, so a linear of few rows takes as long as its weights take to arrive.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_LINEAR_SIZE
from piecegraph.passes.kernels.linear.linear_config import NARROW_COLUMNS, SIZE_MULTIPLE
from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.effects import changed_between, is_unmodified_input
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.matching.torch_ir import NoMatch
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.linear import LINEAR
from piecegraph.passes.ops.norm_linear import ADD_NORM_LINEAR, LINEAR_ADD_NORM_LINEAR
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FuseLinear(GraphPass):
    """A pass that replaces every linear by `piecegraph::linear`.

    An `act_mul` that is the linear's only reader becomes part of it. An `add_rms_norm` whose norm only this linear
    reads becomes part of it too, with the linear that produced the summand. The kernel (ours or the library's) is
    chosen by the rows of each call and the size of the weight; a linear of a few columns has a kernel for any number of
    rows. Linears that compute in float32 are not sites.
    """

    name: ClassVar[str] = "fuse-linear"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in [node for node in graph.nodes if _is_site(node)]:
            try:
                _check(node)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            _fuse(graph, node)
            matches += 1
        return PassResult(matches, tuple(misses))


def _is_site(node: fx.Node) -> bool:
    if not ir.is_call(node, ir.LINEAR) or not ir.is_tensor(ir.argument(node, 1, "weight")):
        return False
    return ir.value_of(ir.argument(node, 1, "weight")).dtype in DTYPES


def _check(node: fx.Node) -> None:
    """Raise `NoMatch` if none of our kernels could ever run this linear."""
    x, weight_node, bias = _operands(node)
    weight = ir.value_of(weight_node)
    if not is_unmodified_input(weight_node):
        raise NoMatch(f"its weight {weight_node} is computed here; wanted is an input that nothing changes")
    if weight.ndim != 2:
        raise NoMatch(f"its weight has {weight.ndim} dims; wanted are 2")
    if ir.dtype_of(x) != weight.dtype:
        raise NoMatch(f"{x} is {ir.dtype_of(x)}, its weight {weight.dtype}; wanted is one dtype")
    if not weight.is_contiguous():
        raise NoMatch(f"its weight has strides {tuple(weight.stride())}; wanted is a contiguous one")
    rows, size = weight.shape
    if rows > NARROW_COLUMNS and (size % SIZE_MULTIPLE or rows % 16):
        raise NoMatch(f"its weight is {rows} x {size}; the kernels take multiples of 16 x {SIZE_MULTIPLE}")
    if bias is not None and (ir.value_of(bias).shape != (rows,) or not ir.value_of(bias).is_contiguous()):
        raise NoMatch(f"its bias has the shape {list(ir.value_of(bias).shape)}; wanted is [{rows}], without gaps")


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return the input, weight and bias of a linear."""
    return ir.argument(node, 0, "input"), ir.argument(node, 1, "weight"), ir.argument(node, 2, "bias")


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias = _operands(node)
    result, activation = node, ""
    readers = list(node.users)
    if len(readers) == 1 and readers[0].target is ACT_MUL and ir.value_of(weight).shape[0] % 32 == 0:
        read = (x,) if bias is None else (x, bias)
        if changed_between(node, readers[0], read) is None:
            (result,) = readers
            activation = str(result.args[1])
    is_narrow = ir.value_of(weight).shape[0] <= NARROW_COLUMNS
    norm = None if is_narrow else _preceding_norm(x, result, bias)
    if norm is None:
        fused = ir.insert_call(graph, result, LINEAR, x, weight, bias, activation)
        result.replace_all_uses_with(fused)
        ir.erase_unread(graph, {node, result})
        return
    total = next((each for each in norm.users if each.args[1] == 1), None)
    both = _insert_with_norm(graph, norm, weight, bias, activation)
    result.replace_all_uses_with(ir.insert_call(graph, norm, operator.getitem, both, 0))
    if total is not None:
        total.replace_all_uses_with(ir.insert_call(graph, norm, operator.getitem, both, 1))
    linears = [each for each in norm.all_input_nodes if each.target is LINEAR]
    ir.erase_unread(graph, {node, result, norm, *norm.users, *linears})


def _insert_with_norm(graph: fx.Graph, norm: fx.Node, weight: Any, bias: Any, activation: str) -> fx.Node:
    """Insert the linear's call with the preceding norm, and with the linear before that if only the norm reads it."""
    one, other, *how = norm.args
    for added, residual in ((one, other), (other, one)):
        if isinstance(added, fx.Node) and added is not residual and _is_part_of(norm, added):
            before = added.args[:3]
            return ir.insert_call(
                graph, norm, LINEAR_ADD_NORM_LINEAR, *before, residual, *how, weight, bias, activation
            )
    return ir.insert_call(graph, norm, ADD_NORM_LINEAR, *norm.args, weight, bias, activation)


def _is_part_of(norm: fx.Node, linear: fx.Node) -> bool:
    """Return whether `linear` is a `piecegraph::linear` without an activation, read by `norm` alone, whose inputs
    nothing changes before `norm`."""
    if linear.target is not LINEAR or linear.args[3] or set(linear.users) != {norm}:
        return False
    return changed_between(linear, norm, linear.all_input_nodes) is None


def _preceding_norm(x: Any, result: fx.Node, bias: Any) -> fx.Node | None:
    """Return the `add_rms_norm` whose norm is `x`, if all of the linear can run in its place; else None.

    Nothing else may read that norm, and the joint kernel reads its weight before the kernels ahead have ended.
    """
    if not ir.is_call(x, ir.GETITEM) or x.args[1] != 0 or len(x.users) > 1:
        return None
    norm = x.args[0]
    if (
        not isinstance(norm, fx.Node)
        or norm.target is not ADD_RMS_NORM
        or ir.value_of(x).shape[-1] > MAX_NORM_LINEAR_SIZE
    ):
        return None
    norm_weight = norm.args[2]
    if isinstance(norm_weight, fx.Node) and not (
        is_unmodified_input(norm_weight) and ir.value_of(norm_weight).is_contiguous()
    ):
        return None
    if bias is not None and (not is_unmodified_input(bias) or changed_between(norm, result, (bias,)) is not None):
        return None
    return norm
