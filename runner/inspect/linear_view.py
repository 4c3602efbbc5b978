"""The linears of a compiled model: how their weights are stored, which are merged, and what multiplies by them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import Plan
from piecegraph.runner.inspect.layer_view import MATMULS
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import Scheme

PLAIN_KERNEL = "torch's GEMM"
"""The kernel of a linear that no pass and no scheme has changed; Inductor may choose another one."""

FEW_ROWS_KERNEL = "our Triton kernels for few rows, the library's GEMM for more"
"""The kernels of a linear over float weights after `fuse-linear`."""

ONEDNN_KERNEL = "oneDNN's GEMM"
"""The kernel of a linear over float32 weights after `use-onednn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRow:
    """Calls of linears that differ in the number of their layer only."""

    names: tuple[str, ...]  # of the modules, with `*` for the layer; several: they are merged into one linear
    calls: int
    num_columns: int
    size: int
    scheme: str  # of quantised weights, else their dtype
    op: str  # in the graph
    kernel: str
    num_bytes: int  # of the weights and scales of all calls together


def linear_rows(
    plan: Plan,
    unique: Sequence[UniquePiece],
    bound: Mapping[str, Any],
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    device_type: str,
) -> tuple[LinearRow, ...]:
    """Return the linears of a model in the order in which they first run.

    `unique` are the pieces that the plan's steps run, `bound` the tensors of its bound slots by name, `schemes` those
    of the model's quantised modules by path. `device_type`: that of the device that they would run on. Graphs are read,
    nothing runs.
    """
    owners = _owners(model)
    rows: dict[LinearRow, list[int]] = {}
    for step in plan.piece_steps:
        graph = unique[step.unique].graph_module.graph
        slots = dict(zip(graph.find_nodes(op="placeholder"), step.inputs, strict=True))
        for node in graph.nodes:
            if not _is_linear(node):
                continue
            for weight, modules in _weights(node, slots, bound, owners):
                row = _row(node, weight, modules, schemes, device_type)
                rows.setdefault(replace(row, num_bytes=0), []).append(row.num_bytes)
    return tuple(replace(row, calls=len(sizes), num_bytes=sum(sizes)) for row, sizes in rows.items())


_Modules = tuple[tuple[str, nn.Module], ...]


def _owners(model: nn.Module) -> dict[int, list[tuple[int, str, nn.Module]]]:
    """Return the modules whose `weight` or `weight_packed` lies in a storage, by the storage, in their order there.

    Of modules that share a weight, one that is a linear is returned.
    """
    found: dict[int, dict[int, tuple[int, str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for short in ("weight", "weight_packed"):
            weight = module._parameters.get(short)
            if weight is None or weight.ndim != 2:
                continue
            there = found.setdefault(weight.untyped_storage()._cdata, {})
            offset = weight.storage_offset()
            if offset not in there or isinstance(module, nn.Linear):
                there[offset] = offset, path, module
    return {storage: [there[offset] for offset in sorted(there)] for storage, there in found.items()}


def _is_linear(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    name = op_name(node.target)
    return node.target in MATMULS or (name.startswith("piecegraph::") and "linear" in name)


def _weights(
    node: fx.Node,
    slots: Mapping[fx.Node, Any],
    bound: Mapping[str, Any],
    owners: Mapping[int, list[tuple[int, str, nn.Module]]],
) -> Iterator[tuple[torch.Tensor, _Modules]]:
    """Yield the matrices that a linear multiplies by, each with the modules that own it."""
    for source in map(_without_views, node.all_input_nodes):
        tensor = bound.get(slots[source].name) if source in slots else None
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 2:
            inside = range(tensor.storage_offset(), tensor.storage_offset() + tensor.numel())
            there = owners.get(tensor.untyped_storage()._cdata, ())
            if modules := tuple((path, module) for offset, path, module in there if offset in inside):
                yield tensor, modules


def _without_views(node: fx.Node) -> fx.Node:
    """Return what a node is a transposed view of, or the node."""
    while node.op == "call_method" and node.target in ("t", "transpose") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _row(
    node: fx.Node, weight: torch.Tensor, modules: _Modules, schemes: Mapping[str, Scheme], device_type: str
) -> LinearRow:
    """Return the row of one call."""
    name = op_name(node.target)
    first_path, first = modules[0]
    scheme = schemes.get(first_path)
    scales = [module._parameters.get("weight_scale") for _, module in modules]
    if scheme is not None:
        kernel = METHODS[scheme.method].kernels[device_type]
    else:
        ours = ONEDNN_KERNEL if name == "piecegraph::onednn_linear" else FEW_ROWS_KERNEL
        kernel = ours if name.startswith("piecegraph::") else PLAIN_KERNEL
    size = getattr(first, "in_features", weight.shape[1])
    return LinearRow(
        names=tuple(re.sub(r"(?<=\.)\d+(?=\.)", "*", path) for path, _ in modules),
        calls=1,
        num_columns=weight.shape[0],
        size=size,
        scheme=str(weight.dtype).removeprefix("torch.") if scheme is None else str(scheme),
        op=name if name.startswith("piecegraph::") else "linear",
        kernel=kernel,
        num_bytes=weight.nbytes + sum(scale.nbytes for scale in scales if scale is not None),
    )
