"""Attention without scale, over all tokens or over a window, as GPT-Neo has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.attend import attend

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_DROPOUT = frozenset({"attn_dropout", "resid_dropout"})


class LocalAttention(nn.Module):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        query, key, value = (
            project(hidden_states).unflatten(-1, (this.num_heads, this.head_dim)).transpose(1, 2)
            for project in (this.q_proj, this.k_proj, this.v_proj)
        )
        window = this.config.window_size if this.attention_type == "local" else None
        out = attend(self, query, key, value, scaling=1.0, sliding_window=window)
        output: torch.Tensor = this.out_proj(out.flatten(2))
        return output, None


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._buffers) != {"bias"} or set(module._modules) != {*_PROJECTIONS, *_DROPOUT} or module._parameters:
        return None
    window = getattr(getattr(module, "config", None), "window_size", None)
    kind = getattr(module, "attention_type", None)
    if kind not in ("global", "local") or (kind == "local" and not (isinstance(window, int) and window > 0)):
        return None
    width = getattr(module, "num_heads", 0) * getattr(module, "head_dim", 0)
    return LocalAttention if all(getattr(module, name).out_features == width for name in _PROJECTIONS[:3]) else None
