"""Attention with one projection whose outputs are sorted by head of keys, as Falcon and BLOOM have it.

For each head of keys there are the query heads that share it, then its key, then its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.alibi import AlibiAttention, alibi_slopes
from piecegraph.runner.attention.modules.attend import attend, attend_with_biases

_PARTS = frozenset({"query_key_value", "dense", "attention_dropout"})


class RotaryMergedAttention(nn.Module):
    """The module of Falcon with rotary embedding; an instance is a module of transformers with this class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: None = None,
        attention_mask: None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None.

        `position_embeddings`: cosines and sines `[1, num_tokens, head_dim]`.
        """
        this: Any = self
        query, key, value = _heads(this, hidden_states)
        assert position_embeddings is not None, "the model hands on no rotary embedding"
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)
        query, key = ((each * cos) + (_half_turned(each) * sin) for each in (query, key))
        out = attend(self, query, key, value, scaling=this.inv_norm_factor)
        output: torch.Tensor = this.dense(out.flatten(2))
        return output, None


class AlibiMergedAttention(AlibiAttention):
    """The module of Falcon with biases, which are scaled as the products are."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        scale = this.inv_norm_factor
        out = attend_with_biases(
            self, *_heads(this, hidden_states), this.alibi_slopes, scaling=scale, slope_scale=scale
        )
        output: torch.Tensor = this.dense(out.flatten(2))
        return output, None


class ResidualMergedAttention(AlibiAttention):
    """The module of BLOOM, with biases, which adds its output to the residual."""

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        """Return the sum of the output and `residual`, `[1, num_tokens, hidden_size]` like its arguments, and None."""
        this: Any = self
        out = attend_with_biases(self, *_heads(this, hidden_states), this.alibi_slopes, scaling=this.inv_norm_factor)
        output: torch.Tensor = residual + this.dense(out.flatten(2))
        return output, None


class PartlyRotaryMergedAttention(nn.Module):
    """The module of GPT-NeoX-Japanese, which rotates the first numbers of a head and returns its bias unadded."""

    @staticmethod
    def take_over(module: Any) -> None:
        """Give a module the names that others of the kind have."""
        module.num_heads, module.head_dim = module.num_attention_heads, module.head_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, None and the bias.

        `position_embeddings`: cosines and sines `[1, num_tokens, rotary_ndims]`.
        """
        this: Any = self
        query, key, value = _heads(this, hidden_states)
        assert position_embeddings is not None, "the model hands on no rotary embedding"
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)
        rotated, kept = zip(*(each.tensor_split([this.rotary_ndims], dim=-1) for each in (query, key)), strict=True)
        query, key = (
            torch.cat(((each * cos) + (_half_turned(each) * sin), rest), dim=-1)
            for each, rest in zip(rotated, kept, strict=True)
        )
        out = attend(self, query, key, value, scaling=this.head_dim**-0.5)
        return this.dense(out.flatten(2)), None, this.dense_bias


def _heads(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value `[1, heads, num_tokens, head_dim]`, the last two of fewer heads if shared."""
    num_kv_heads = _num_kv_heads(module)
    group = module.num_heads // num_kv_heads
    merged = module.query_key_value(hidden).view(1, -1, num_kv_heads, group + 2, module.head_dim)
    query = merged[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), merged[..., -2, :].transpose(1, 2), merged[..., -1, :].transpose(1, 2)


def _num_kv_heads(module: Any) -> int:
    """Return the heads of keys that the outputs of the projection have besides the query heads."""
    heads: int = module.query_key_value.out_features // module.head_dim - module.num_heads
    return heads // 2


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != _PARTS or module._buffers:
        return None
    if hasattr(module, "dense_bias"):  # a parameter in the last layer, None in the others
        return _partly_rotary(module)
    if module._parameters:
        return None
    heads, dim = getattr(module, "num_heads", None), getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(dim, int) or module.dense.in_features != heads * dim:
        return None
    rows, kv_heads = module.query_key_value.out_features, _num_kv_heads(module)
    if rows != (heads + 2 * kv_heads) * dim or kv_heads < 1 or heads % kv_heads:
        return None
    if abs(getattr(module, "inv_norm_factor", 0.0) - dim**-0.5) > 1e-9:
        return None
    if hasattr(module, "slow_but_exact"):
        is_alike = kv_heads == heads and getattr(module, "beta", 0.0) == 1.0
        return ResidualMergedAttention if is_alike and alibi_slopes(module, heads) is not None else None
    if not hasattr(module, "new_decoder_architecture"):
        return None
    if not module.config.alibi:
        return RotaryMergedAttention
    return AlibiMergedAttention if alibi_slopes(module, heads) is not None else None


def _partly_rotary(module: Any) -> type[nn.Module] | None:
    heads, dim = getattr(module, "num_attention_heads", None), getattr(module, "head_size", None)
    rotary_dim = getattr(module, "rotary_ndims", None)
    if set(module._parameters) - {"dense_bias"} or not isinstance(getattr(module, "norm_factor", None), float):
        return None
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(rotary_dim, int):
        return None
    is_alike = module.query_key_value.out_features == 3 * heads * dim and module.dense.in_features == heads * dim
    is_alike = is_alike and 0 < rotary_dim <= dim and abs(module.norm_factor - dim**0.5) < 1e-6
    return PartlyRotaryMergedAttention if is_alike else None
