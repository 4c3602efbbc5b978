"""Attention with a table of rotary embeddings that turns pairs of adjacent numbers, as GPT-J and CodeGen have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.attend import attend

_DROPOUT = frozenset({"attn_dropout", "resid_dropout"})
_SIZES = ("num_attention_heads", "head_dim", "rotary_dim")

NUM_PARTS = 4
"""The parts of the rows of a merged projection; each holds some heads of query, value and key."""


class RotaryPairsAttention(nn.Module):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        layer_past: None = None,
        attention_mask: None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None.

        `position_ids` `[1, num_tokens]`.
        """
        this: Any = self
        query, key, value = (
            each.unflatten(-1, (this.num_attention_heads, this.head_dim)) for each in this._projected(hidden_states)
        )
        sin, cos = this._table(position_ids, key.dtype).unsqueeze(2).chunk(2, dim=-1)
        query, key = (turned(each, sin, cos, this.rotary_dim) for each in (query, key))
        query, key, value = (each.to(hidden_states.dtype).transpose(1, 2) for each in (query, key, value))
        out = attend(self, query, key, value, scaling=this.head_dim**-0.5)
        output: torch.Tensor = this.out_proj(out.flatten(2))
        return output, None


class SeparateRotaryPairsAttention(RotaryPairsAttention):
    """The module of GPT-J: a projection each, and a table that is read in the dtype of the keys."""

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        return this.q_proj(hidden), this.k_proj(hidden), this.v_proj(hidden)

    def _table(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        this: Any = self
        table: torch.Tensor = this.embed_positions[positions].to(dtype)
        return table


class MergedRotaryPairsAttention(RotaryPairsAttention):
    """The module of CodeGen: one projection, whose rows come in parts, and a table that is read as it is."""

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        parts = this.qkv_proj(hidden).unflatten(-1, (NUM_PARTS, 3, -1))
        query, value, key = (each.flatten(-2) for each in parts.unbind(-2))
        return query, key, value

    def _table(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        this: Any = self
        table: torch.Tensor = this.embed_positions[positions]
        return table


def turned(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Return `x` `[1, num_tokens, num_heads, head_dim]` with its first numbers rotated by pairs.

    `sin` and `cos` `[1, num_tokens, 1, rotary_dim / 2]`.
    """
    first, second = x[..., :rotary_dim:2], x[..., 1:rotary_dim:2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._buffers) != {"embed_positions"} or module._parameters:
        return None
    if not all(isinstance(getattr(module, name, None), int) for name in _SIZES):
        return None
    if module.embed_positions.shape[-1] != module.rotary_dim:
        return None
    parts, width = set(module._modules) - _DROPOUT, module.num_attention_heads * module.head_dim
    if parts == {"q_proj", "k_proj", "v_proj", "out_proj"}:
        is_alike = all(getattr(module, name).out_features == width for name in ("q_proj", "k_proj", "v_proj"))
        return SeparateRotaryPairsAttention if is_alike else None
    if parts == {"qkv_proj", "out_proj"}:
        is_alike = module.qkv_proj.out_features == 3 * width and module.num_attention_heads % NUM_PARTS == 0
        return MergedRotaryPairsAttention if is_alike else None
    return None
