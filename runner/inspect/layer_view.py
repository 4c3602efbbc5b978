"""One layer of a compiled model: what a decode step launches for the layer, as far as the graph shows."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.splitting.passthrough import needs_no_codegen
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Step
from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.passes.kernels.linear.linear_config import linear_config
from piecegraph.passes.matching.effects import is_pure
from piecegraph.passes.matching.torch_ir import argument, value_of
from piecegraph.runner.attention.interface.op_call import ATTENTION_OP, ATTENTION_OPS, ROPE_ATTENTION_OP

LAUNCHES: Mapping[str, int] = {
    "piecegraph::moe_experts": 4, "piecegraph::quantised_experts": 5, "piecegraph::add_norm_linear": 2,
    "piecegraph::linear_add_norm_linear": 3, "piecegraph::all_reduce": 2, "piecegraph::all_reduce_add_rms_norm": 2,
    "piecegraph::all_reduce_add_norm_linear": 3,
    "piecegraph::all_reduce_add_rms_norm_rounded": 2, "piecegraph::int8_inputs_linear": 2,
}  # fmt: skip
"""The number of kernels that a call of one of our ops launches in a decode step of two or more requests, if not one."""

SPLIT_OP_LAUNCHES: Mapping[str, Mapping[str, int]] = {
    "triton": {ATTENTION_OP: 1, ROPE_ATTENTION_OP: 1},
    "flash_attn": {ATTENTION_OP: 2, ROPE_ATTENTION_OP: 3},
}
"""The number of kernels of a call for requests with one new token each, by attention backend; not known for others."""

MATMULS = (F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, operator.matmul)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """The layer in the middle of the model: all steps after one attention call up to and including the next."""

    unique_pieces: tuple[int, ...]  # the pieces that the layer runs, in order
    ours: dict[str, int]  # op inserted by a pass -> kernels it launches in the layer
    matmuls: int  # calls of the library, or of kernels that Inductor makes instead
    left_to_inductor: int  # computing operations in pieces that Inductor compiles
    split_ops: dict[str, int | None]  # split op -> kernels it launches in a decode step; None: not known

    @property
    def launches(self) -> int:
        """The number of kernels known before anything is compiled: ours, matmuls and split ops.

        A matmul of the library counts as one; a split sum would add one or two.
        """
        return sum(self.ours.values()) + self.matmuls + sum(count or 0 for count in self.split_ops.values())


def middle_layer(
    plan: Plan, unique: Sequence[UniquePiece], backend: str, gpu: GpuLimits, device_type: str
) -> LayerView | None:
    """Return the layer in the middle of the model as attention backend `backend` runs it; None without attention.

    `unique` are the pieces that the plan's steps run; their graphs are read, nothing runs. `device_type`: the device
    that they would run on.
    """
    steps = _middle_steps(plan)
    if not steps:
        return None
    pieces = tuple(step.unique for step in steps if isinstance(step, PieceStep))
    ours: Counter[str] = Counter()
    matmuls = left = 0
    graphs = [unique[index].graph_module for index in pieces]
    compiled = {each.graph for each in graphs if not needs_no_codegen(each, device_type)}
    for node in (node for each in graphs for node in _computing(each.graph)):
        name = op_name(node.target) if node.op == "call_function" else str(node.target)
        if name.startswith("piecegraph::"):
            ours[name] += LAUNCHES.get(name, 1) + _has_activation_apart(name, node, gpu) + _rounds_rows(name, node)
        elif node.target in MATMULS:
            matmuls += 1
        else:
            left += node.graph in compiled
    split_ops: dict[str, int | None] = {}
    for step in steps:
        if isinstance(step, CallStep) and step.is_split_op:
            known = SPLIT_OP_LAUNCHES.get(backend, {}).get(step.op)
            split_ops[step.op] = None if known is None else (split_ops.get(step.op) or 0) + known
    return LayerView(unique_pieces=pieces, ours=dict(ours), matmuls=matmuls, left_to_inductor=left, split_ops=split_ops)


_ACTIVATION_AT = {
    "piecegraph::linear": 3, "piecegraph::add_norm_linear": 7, "piecegraph::all_reduce_add_norm_linear": 7,
    "piecegraph::linear_add_norm_linear": 9,
}  # fmt: skip
"""The index of the activation among an op's arguments; the weight is two before it."""


def _has_activation_apart(name: str, node: fx.Node, gpu: GpuLimits) -> bool:
    """Return True if a linear's activation is a separate kernel, because the library runs the linear at two rows."""
    at = _ACTIVATION_AT.get(name)
    if at is None or not argument(node, at, "activation"):
        return False
    weight = value_of(argument(node, at - 2, "weight"))
    rows, size = weight.shape
    return linear_config(2, rows // 2, size, is_gated=True, itemsize=weight.element_size(), gpu=gpu) is None


def _rounds_rows(name: str, node: fx.Node) -> bool:
    """Return whether a linear of e4m3 weights rounds its rows by a kernel of its own."""
    return name == "piecegraph::fp8_linear" and bool(argument(node, 5, "input_group"))


def _middle_steps(plan: Plan) -> tuple[Step, ...]:
    """Return the steps after one attention call up to and including the next; all steps of a model with one layer."""
    calls = [at for at, step in enumerate(plan.steps) if isinstance(step, CallStep) and step.op in ATTENTION_OPS]
    if len(calls) < 2:
        return plan.steps if calls else ()
    middle = (len(calls) - 1) // 2
    return plan.steps[calls[middle] + 1 : calls[middle + 1] + 1]


def _computing(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that compute numbers: no views, no items of a tuple, no sizes."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            if is_pure(node) and any(_shares_memory(value, value_of(read)) for read in node.all_input_nodes):
                continue
            yield node
        elif isinstance(value, tuple | list) and not all(
            any(_shares_memory(item, value_of(read)) for read in node.all_input_nodes) for item in value
        ):
            yield node


def _shares_memory(value: object, other: object) -> bool:
    """Return True if one value is a view of the other, as far as fake tensors show."""
    others = other if isinstance(other, tuple | list) else (other,)
    return isinstance(value, torch.Tensor) and any(
        isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == value.untyped_storage()._cdata
        for each in others
    )
