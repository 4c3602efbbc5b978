"""`fuse-linear`: linears of a decode step's few rows take kernels of ours, gated activations in their epilogue.

A decode step reads every weight once, so a linear of few rows takes as long as its weights take to arrive. Where
they are many (`linear_config.MAX_WEIGHT_BYTES`) the library is as fast, and the linear stays torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from piecegraph.passes import torch_ir as ir
from piecegraph.passes.effects import changed_between, is_left_alone
from piecegraph.passes.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.kernels.linear_config import MAX_WEIGHT_BYTES, SIZE_MULTIPLE
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.linear import LINEAR
from piecegraph.passes.torch_ir import NoMatch

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FuseLinear(GraphPass):
    """Every linear of up to `max_weight_bytes` becomes `piecegraph::linear`; an `act_mul` that alone reads it
    becomes part of it. Which kernel runs, or the library's, depends on the rows of each call.

    Larger linears, and those that compute in float32, are no sites.
    """

    name: ClassVar[str] = "fuse-linear"

    max_weight_bytes: int = MAX_WEIGHT_BYTES

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in [node for node in graph.nodes if self._is_site(node)]:
            try:
                _check(node)
            except NoMatch as reason:
                misses.append(Miss(node.name, str(reason)))
                continue
            _fuse(graph, node)
            matches += 1
        return PassResult(matches, tuple(misses))

    def _is_site(self, node: fx.Node) -> bool:
        if not ir.is_call(node, ir.LINEAR) or not ir.is_tensor(ir.argument(node, 1, "weight")):
            return False
        weight = ir.value_of(ir.argument(node, 1, "weight"))
        return weight.dtype in DTYPES and weight.numel() * weight.element_size() <= self.max_weight_bytes


def _check(node: fx.Node) -> None:
    """Raises `NoMatch` where no kernel of ours could ever run."""
    x, weight_node, bias = _operands(node)
    weight = ir.value_of(weight_node)
    if not is_left_alone(weight_node):
        raise NoMatch(f"its weight {weight_node} is computed here; wanted is an input that nothing changes")
    if weight.ndim != 2:
        raise NoMatch(f"its weight has {weight.ndim} dims; wanted are 2")
    if ir.dtype_of(x) != weight.dtype:
        raise NoMatch(f"{x} is {ir.dtype_of(x)}, its weight {weight.dtype}; wanted is one dtype")
    if not weight.is_contiguous():
        raise NoMatch(f"its weight has strides {tuple(weight.stride())}; wanted is a contiguous one")
    rows, size = weight.shape
    if size % SIZE_MULTIPLE or rows % 16:
        raise NoMatch(f"its weight is {rows} x {size}; the kernels take multiples of 16 x {SIZE_MULTIPLE}")
    if bias is not None and (ir.value_of(bias).shape != (rows,) or not ir.value_of(bias).is_contiguous()):
        raise NoMatch(f"its bias has the shape {list(ir.value_of(bias).shape)}; wanted is [{rows}], without gaps")


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear."""
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
    fused = ir.insert_call(graph, result, LINEAR, x, weight, bias, activation)
    result.replace_all_uses_with(fused)
    ir.erase_unread(graph, {node, result})
