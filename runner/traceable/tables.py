"""Tables of positions that a module would extend or replace in its forward, which a compiled model cannot do.

A text is never longer than the positions of a model, so a table is long enough; and it is loaded where the model is, in
its dtype.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


class WholeTable(nn.Module):
    """The sinusoidal table of XGLM, which never grows; an instance is a module of transformers with this class."""

    def forward(self, position_ids: torch.Tensor, *args: int) -> torch.Tensor:
        """Return the rows `[1, num_tokens, embedding_dim]` of `position_ids` `[1, num_tokens]`."""
        this: Any = self
        rows: torch.Tensor = this.weights[position_ids + this.offset]
        return rows


class KeepsItsTable(nn.Module):
    """The base of a model whose `pos_encoding` stays the buffer that it is, whatever its forward assigns (CTRL)."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but not the table."""
        if name != "pos_encoding":
            super().__setattr__(name, value)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if it is of another kind."""
    if set(module._buffers) == {"weights"} and hasattr(module, "make_weights") and not module._modules:
        is_alike = isinstance(getattr(module, "offset", None), int) and module.weights.dim() == 2
        return WholeTable if is_alike and not module._parameters else None
    if "pos_encoding" in module._buffers and "self.pos_encoding = self.pos_encoding.to(" in _code(type(module)):
        return type(type(module).__name__, (KeepsItsTable, type(module)), {"__module__": type(module).__module__})
    return None


def _code(kind: type[nn.Module]) -> str:
    """Return the code of a class's forward, without the decorators around it; "" if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return ""
