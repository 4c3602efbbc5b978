"""One layer of a compiled model, seen from outside: what a decode step launches for it, as far as a graph tells."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.compiler.as_it_is import runs_as_it_is
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Step
from piecegraph.compiler.split_ops import op_name
from piecegraph.passes.effects import is_pure
from piecegraph.passes.kernels.gpu_limits import GpuLimits
from piecegraph.passes.kernels.linear_config import linear_config
from piecegraph.passes.torch_ir import argument, value_of
from piecegraph.runner.attention.op_call import ATTENTION_OP

ROPE_ATTENTION_OP = "piecegraph::rope_attention"
"""What `fuse-rope-kv-write` makes of it."""

LAUNCHES: Mapping[str, int] = {
    "piecegraph::moe_experts": 4, "piecegraph::add_norm_linear": 2, "piecegraph::linear_add_norm_linear": 3,
}  # fmt: skip
"""Kernels that a call of an op of ours launches in a decode step of two requests or more, where that is not one."""

SPLIT_OP_LAUNCHES: Mapping[str, Mapping[str, int]] = {
    "triton": {ATTENTION_OP: 1, ROPE_ATTENTION_OP: 1},
    "flash_attn": {ATTENTION_OP: 2, ROPE_ATTENTION_OP: 3},
}
"""By attention backend: kernels a call launches for requests with one new token each. Others: not known."""

MATMULS = (F.linear, torch._C._nn.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, operator.matmul)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """What follows one attention call up to and with the next, in the middle of the model."""

    unique_pieces: tuple[int, ...]  # that the layer runs, in order
    ours: dict[str, int]  # op that a pass put there -> kernels it launches in the layer
    matmuls: int  # calls of the library, or of a kernel Inductor makes instead
    left_to_inductor: int  # operations that compute something, in pieces that it makes kernels of as it sees fit
    split_ops: dict[str, int | None]  # split op -> kernels it launches in a decode step; None: not known

    @property
    def launches(self) -> int:
        """Kernels known before anything is compiled: ours, matmuls and split ops. A matmul of the library counts as
        one; it may split its sum, which is one or two more."""
        return sum(self.ours.values()) + self.matmuls + sum(count or 0 for count in self.split_ops.values())


def middle_layer(
    plan: Plan, unique: Sequence[UniquePiece], backend: str, gpu: GpuLimits, device_type: str
) -> LayerView | None:
    """The layer in the middle of the model as attention backend `backend` runs it; None: there is no attention.

    `unique` are the pieces the plan's steps run; their graphs are read, nothing runs. `device_type`: where they would.
    """
    steps = _middle_steps(plan)
    if not steps:
        return None
    pieces = tuple(step.unique for step in steps if isinstance(step, PieceStep))
    ours: Counter[str] = Counter()
    matmuls = left = 0
    graphs = [unique[index].graph_module for index in pieces]
    compiled = {each.graph for each in graphs if not runs_as_it_is(each, device_type)}
    for node in (node for each in graphs for node in _computing(each.graph)):
        name = op_name(node.target) if node.op == "call_function" else str(node.target)
        if name.startswith("piecegraph::"):
            ours[name] += LAUNCHES.get(name, 1) + _has_activation_apart(name, node, gpu)
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


_ACTIVATION_AT = {"piecegraph::linear": 3, "piecegraph::add_norm_linear": 7, "piecegraph::linear_add_norm_linear": 9}
"""Which argument it is; two before it is the weight."""


def _has_activation_apart(name: str, node: fx.Node, gpu: GpuLimits) -> bool:
    """A linear with an activation that is the library's for two rows: then that is a kernel of its own."""
    at = _ACTIVATION_AT.get(name)
    if at is None or not argument(node, at, "activation"):
        return False
    weight = value_of(argument(node, at - 2, "weight"))
    rows, size = weight.shape
    return linear_config(2, rows // 2, size, is_gated=True, itemsize=weight.element_size(), gpu=gpu) is None


def _middle_steps(plan: Plan) -> tuple[Step, ...]:
    """After one attention call up to and with the next one; of a model with one layer, all of it."""
    calls = [
        at
        for at, step in enumerate(plan.steps)
        if isinstance(step, CallStep) and step.op in (ATTENTION_OP, ROPE_ATTENTION_OP)
    ]
    if len(calls) < 2:
        return plan.steps if calls else ()
    middle = (len(calls) - 1) // 2
    return plan.steps[calls[middle] + 1 : calls[middle + 1] + 1]


def _computing(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that make numbers: no views, no items of a tuple, no sizes."""
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
    """One is a view of the other, as far as fake tensors tell."""
    others = other if isinstance(other, tuple | list) else (other,)
    return isinstance(value, torch.Tensor) and any(
        isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == value.untyped_storage()._cdata
        for each in others
    )
