"""Steps of a plan that take the same kernels: what one of them warmed up, the others find warm."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from piecegraph.compiler.graphs.bound_plan import arguments_of
from piecegraph.compiler.graphs.prepared_ops import Kind, PreparedOp
from piecegraph.compiler.plan import PieceStep, Step

MAX_ALIGNMENT = 16
"""Bytes, the widest load of a thread and what TMA asks for: kernels are not chosen by more of an address."""


def kinds_of(prepared_ops: Mapping[str, PreparedOp]) -> Mapping[str, Kind]:
    """Those that split ops were registered with, by op."""
    return {op: prepared.kind for op, prepared in prepared_ops.items() if prepared.kind is not None}


def step_kind(step: Step, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Hashable | None:
    """Steps of one bucket with equal kinds take the same kernels; None: nobody can tell.

    Pieces do if they are the same unique piece over inputs alike; split ops if their `kind` says so.
    """
    if isinstance(step, PieceStep):
        return step.unique, tuple(value_kind(values[slot.name]) for slot in step.inputs)
    if not step.is_split_op or step.op not in kinds:
        return None
    args, kwargs = arguments_of(step, values)
    return step.op, value_kind(kinds[step.op](*args, **kwargs))


def value_kind(value: Any) -> Hashable:
    """What a kernel may be chosen by: of a tensor all but its numbers, of anything else the value itself.

    That of a tensor whose memory is not plain equals no other.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_nested:
            return object()
        address = value.data_ptr() | MAX_ALIGNMENT
        return value.dtype, value.device, value.shape, value.stride(), address & -address
    if isinstance(value, tuple | list):
        return tuple(map(value_kind, value))
    return type(value), value
