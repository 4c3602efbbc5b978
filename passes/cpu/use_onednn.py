"""`use-onednn`: compute linears in float32 on a CPU by oneDNN.

For float32 torch calls MKL, whose kernels for processors that are not Intel's are far from what these can do: they read
weights larger than the caches at 0.6 of the rate of oneDNN's (docs/measurements/2026-11-25-cpu.md). The weights stay as
they are. For bfloat16 and float16 torch calls oneDNN by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, PassContext, PassResult
from piecegraph.passes.ops.cpu.onednn_linear import ONEDNN_LINEAR

MIN_NUMBERS = 1 << 18
"""The fewest numbers of a weight (1 MiB in float32) for which oneDNN is called.

A call of it costs some 10 us more than one of MKL, which computes a row of a smaller linear in that time."""


@dataclass(frozen=True, slots=True)
class UseOneDNN(GraphPass):
    """A pass that replaces linears by `piecegraph::onednn_linear`.

    A site is a linear in float32 on a CPU whose weight has `MIN_NUMBERS` numbers or more, as far as that is known. It
    matches if the weight is contiguous, or the transpose of a contiguous tensor. The results differ from MKL's in the
    order of sums.
    """

    name: ClassVar[str] = "use-onednn"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        matches = 0
        misses = []
        for node in [node for node in graph.nodes if _is_site(node)]:
            x, weight, bias = (ir.argument(node, at, name) for at, name in enumerate(("input", "weight", "bias")))
            if not (ir.value_of(weight).is_contiguous() or ir.value_of(weight).t().is_contiguous()):
                misses.append(Miss(node.name, f"its weight has the strides {ir.value_of(weight).stride()}"))
                continue
            node.replace_all_uses_with(ir.insert_call(graph, node, ONEDNN_LINEAR, x, weight, bias))
            graph.erase_node(node)
            matches += 1
        return PassResult(matches, tuple(misses))


def _is_site(node: fx.Node) -> bool:
    if not ir.is_call(node, ir.LINEAR) or not ir.is_tensor(node) or ir.dtype_of(node) is not torch.float32:
        return False
    weight = ir.value_of(ir.argument(node, 1, "weight"))
    numbers = weight.shape.numel()
    is_there = weight.device.type in ("cpu", "meta")  # `explain` has graphs of meta tensors
    return is_there and weight.ndim == 2 and isinstance(numbers, int) and numbers >= MIN_NUMBERS
