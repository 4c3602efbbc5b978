"""The kinds of steps: steps of equal kind use the same kernels, so warming up one of them suffices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from piecegraph.compiler.graphs.replay.bound_plan import arguments_of
from piecegraph.compiler.graphs.replay.prepared_ops import Kind, PreparedOp
from piecegraph.compiler.splitting.plan import PieceStep, Step

MAX_ALIGNMENT = 16
"""Bytes: the widest load of a thread and the alignment of TMA. Kernels are not chosen by a larger alignment."""


def kinds_of(prepared_ops: Mapping[str, PreparedOp]) -> Mapping[str, Kind]:
    """Return the `kind` functions of the prepared ops that have one, by op."""
    return {op: prepared.kind for op, prepared in prepared_ops.items() if prepared.kind is not None}


def step_kind(step: Step, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Hashable | None:
    """Return the kind of a step, or None if it is unknown. Steps of one bucket with equal kinds use the same kernels.

    The kind of a piece is its unique piece and the kinds of its inputs; the kind of a split op is the result of its
    `kind` function.
    """
    if isinstance(step, PieceStep):
        return step.unique, tuple(value_kind(values[slot.name]) for slot in step.inputs)
    if not step.is_split_op or step.op not in kinds:
        return None
    args, kwargs = arguments_of(step, values)
    return step.op, value_kind(kinds[step.op](*args, **kwargs))


def value_kind(value: Any) -> Hashable:
    """Return what a kernel may be chosen by: everything but the contents of a tensor, or any other value itself.

    The kind of a tensor without plain strided memory equals no other kind.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_nested:
            return object()
        address = value.data_ptr() | MAX_ALIGNMENT
        return value.dtype, value.device, value.shape, value.stride(), address & -address
    if isinstance(value, tuple | list):
        return tuple(map(value_kind, value))
    return type(value), value
