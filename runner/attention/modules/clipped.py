"""Attention with one projection for query, key and value, whose outputs may be clipped, and biases, as MPT has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.alibi import AlibiAttention, alibi_slopes
from piecegraph.runner.attention.modules.attend import attend_with_biases


class ClippedAttention(AlibiAttention):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        mixed = this.Wqkv(hidden_states)
        if this.clip_qkv:
            mixed = mixed.clamp(min=-this.clip_qkv, max=this.clip_qkv)
        heads = mixed.view(1, -1, 3, this.n_heads, this.head_dim)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        out = attend_with_biases(self, query, key, value, this.alibi_slopes, scaling=this.softmax_scale)
        output: torch.Tensor = this.out_proj(out.flatten(2))
        return output, None


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != {"Wqkv", "out_proj"} or module._parameters or module._buffers:
        return None
    heads, dim = getattr(module, "n_heads", None), getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(module.softmax_scale, float):
        return None
    if module.Wqkv.out_features != 3 * heads * dim or alibi_slopes(module, heads) is None:
        return None
    return ClippedAttention
