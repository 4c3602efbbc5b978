"""A piece's graph with every float in float64: the reference for numerical errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({"float", "half", "bfloat16"})
_GROUPED = frozenset({"grouped_mm", "_grouped_mm"})
"""Names of torch's grouped matmuls, which do not take float64."""


def to_float64(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph of torch IR that computes in float64 from float64 inputs.

    Casts to other floats, such as the model's internal casts to float32, become casts to float64. Casts to integers
    stay. `graph_module` is not changed.
    """
    lifted = copy.deepcopy(graph_module)
    for node in lifted.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "double"
        if getattr(node.target, "__name__", "") in _GROUPED:
            node.target = grouped_mm
        node.args = map_aggregate(node.args, _lifted)
        node.kwargs = map_aggregate(node.kwargs, _lifted)
    lifted.recompile()
    return lifted


def value_to_float64(value: Any) -> Any:
    """Return a tensor of floats in float64, and any other value unchanged."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def run_in_float64(lifted: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the outputs of `lifted`, a graph from `to_float64`, over inputs of any float dtype."""
    with torch.no_grad():
        return tuple(lifted.forward(*map(value_to_float64, inputs)))


def grouped_mm(
    rows: torch.Tensor,  # [num_rows, in]
    weights: torch.Tensor,  # [num_groups, in, out]
    *,
    offs: torch.Tensor,  # [num_groups]: where each group of rows ends
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `torch._grouped_mm` for any float dtype. Rows after the last group are 0. Waits for the device."""
    assert rows.dim() == 2 and weights.dim() == 3 and bias is None, (rows.shape, weights.shape, bias)
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    start = 0
    for end, weight in zip(offs.tolist(), weights, strict=True):
        out[start:end] = rows[start:end] @ weight
        start = end
    return out


def _lifted(argument: Any) -> Any:
    return torch.float64 if argument in _FLOATS else argument
