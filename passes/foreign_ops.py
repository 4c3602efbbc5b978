"""Ops that are neither torch's nor ours: what they count on, nobody can see in a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piecegraph.passes.effects import CONTIGUOUS, RESHAPE, VIEWS
from piecegraph.passes.torch_ir import CASTS, GETITEM

KNOWN = frozenset({"aten", "prims", "prim", "higher_order", "piecegraph"})
"""Namespaces whose ops take tensors strided as they come."""


def is_foreign(target: Any) -> bool:
    """An op that may count on the strides its author saw. One that does not says so with torch's own
    `torch.Tag.flexible_layout`."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(is_foreign(getattr(target, overload)) for overload in target.overloads())
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace not in KNOWN
        and torch.Tag.flexible_layout not in target.tags
    )


def relies_on_strides(node: fx.Node) -> bool:
    """Such an op reads a tensor, itself or a view of it."""
    return any(
        is_foreign(user.target) or (user.target in _PASSING_ON and relies_on_strides(user)) for user in node.users
    )


_PASSING_ON = VIEWS | RESHAPE | CONTIGUOUS | CASTS | GETITEM
"""Calls that may return their input's memory."""
