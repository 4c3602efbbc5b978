"""The op `piecegraph::varlen_attention`, at which the graph of a pooling model is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.runner.attention.interface.forward_context import StepContext, current_context
from piecegraph.runner.attention.varlen.call import SCHEMA, VARLEN_OP, VarlenAttention, VarlenCall, VarlenMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenContext(StepContext):
    """The implementation and the batch of one forward pass of a pooling model."""

    attention: VarlenAttention
    metadata: VarlenMetadata


def _run(*args: Any) -> None:
    call = VarlenCall(*args)
    assert call.unsupported is None, call.unsupported
    context = current_context()
    assert isinstance(context, VarlenContext), f"{VARLEN_OP} ran outside of a pooling step"
    context.attention.forward(call, context.metadata)


_library = torch.library.Library("piecegraph", "FRAGMENT")
_library.define(SCHEMA)
_library.impl(VARLEN_OP.partition("::")[2], _run, "CompositeExplicitAutograd")
torch.library.register_fake(VARLEN_OP, lambda *args: None, lib=_library)
