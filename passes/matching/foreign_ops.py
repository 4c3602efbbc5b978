"""Ops that are neither torch's nor ours, whose requirements no graph shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piecegraph.passes.matching.effects import CONTIGUOUS, RESHAPE, VIEWS
from piecegraph.passes.matching.torch_ir import CASTS, GETITEM
from piecegraph.passes.ops.op_types import OpOverload, OpOverloadPacket

KNOWN = frozenset({"aten", "prims", "prim", "higher_order", "piecegraph"})
"""The namespaces whose ops take tensors with any strides."""


def is_foreign(target: Any) -> bool:
    """Return whether an op may rely on the strides its author saw.

    An op that does not rely on them has torch's tag `torch.Tag.flexible_layout`.
    """
    if isinstance(target, OpOverloadPacket):
        return any(is_foreign(getattr(target, overload)) for overload in target.overloads())
    return (
        isinstance(target, OpOverload)
        and target.namespace not in KNOWN
        and torch.Tag.flexible_layout not in target.tags
    )


def relies_on_strides(node: fx.Node) -> bool:
    """Return whether a foreign op reads the node's tensor, or a view of it."""
    return any(
        is_foreign(user.target) or (user.target in _PASSING_ON and relies_on_strides(user)) for user in node.users
    )


_PASSING_ON = VIEWS | RESHAPE | CONTIGUOUS | CASTS | GETITEM
"""The calls that may return their input's memory."""
