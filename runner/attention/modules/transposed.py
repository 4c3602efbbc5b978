"""Attention with one projection whose weight is stored transposed, and a buffer for its mask, as OpenAI GPT has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.attend import attend


class TransposedAttention(nn.Module):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    def forward(self, x: torch.Tensor, *args: None, **kwargs: object) -> list[torch.Tensor]:
        """Return the output `[1, num_tokens, hidden_size]` for `x` of the same shape, in a list."""
        this: Any = self
        shape = (1, -1, this.n_head, this.split_size // this.n_head)
        query, key, value = (each.view(shape).transpose(1, 2) for each in this.c_attn(x).chunk(3, dim=-1))
        out = attend(self, query, key, value, scaling=query.shape[-1] ** -0.5 if this.scale else 1.0)
        return [this.c_proj(out.flatten(2))]


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != {"c_attn", "c_proj", "attn_dropout", "resid_dropout"} or module._parameters:
        return None
    if set(module._buffers) != {"bias"} or not isinstance(getattr(module, "scale", None), bool):
        return None
    size, heads, bias = getattr(module, "split_size", None), getattr(module, "n_head", None), module.bias
    if not isinstance(size, int) or not isinstance(heads, int) or size % heads:
        return None
    if bias.dim() != 4 or not (bias.is_meta or torch.equal(bias, torch.ones_like(bias).tril())):
        return None
    return TransposedAttention if getattr(module.c_attn, "nf", 0) == 3 * size else None
