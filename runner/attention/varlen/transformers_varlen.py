"""Attention without a cache in transformers' `AttentionInterface`, for models that pool.

As for generation, no mask function is registered under our name, so transformers builds no mask: the bounds of the
sequences, causality and windows are applied by the op.
"""

from __future__ import annotations

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.attention.interface.transformers_attention import unsupported_argument
from piecegraph.runner.attention.varlen import op as _op  # noqa: F401  (registers the op)

VARLEN_IMPLEMENTATION = "piecegraph_varlen"
"""The value of `attn_implementation` under which a pooling model is loaded."""


def register_varlen_attention() -> None:
    """Register `attn_implementation="piecegraph_varlen"` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN_IMPLEMENTATION, transformers_varlen)


def transformers_varlen(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Call `piecegraph::varlen_attention`, which tracing puts into the graph as one node.

    Returns `[1, num_tokens, num_q_heads, value_dim]`, and None for the attention weights.
    """
    unsupported = unsupported_argument(attention_mask is not None, dropout, kwargs)
    query, key, value = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    torch.ops.piecegraph.varlen_attention.default(
        query,
        key,
        value,
        out,
        float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        bool(is_causal if is_causal is not None else getattr(module, "is_causal", True)),
        int(sliding_window) if sliding_window is not None else 0,
        float(softcap) if softcap is not None else 0.0,
        s_aux,
        None,
        1.0,
        unsupported,
        getattr(module, NAME_ATTRIBUTE),
    )
    return out.unsqueeze(0), None


def biased_varlen(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    slopes: torch.Tensor,  # [num_q_heads] float32 or bfloat16
    *,
    scaling: float,
    slope_scale: float = 1.0,
) -> torch.Tensor:
    """Call `piecegraph::varlen_attention` with linear biases, which no class of transformers does by itself.

    It is causal. Returns `[1, num_tokens, num_q_heads, value_dim]`.
    """
    query, key, value = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    torch.ops.piecegraph.varlen_attention.default(
        query, key, value, out, scaling, True, 0, 0.0, None, slopes, slope_scale, None, getattr(module, NAME_ATTRIBUTE)
    )
    return out.unsqueeze(0)
