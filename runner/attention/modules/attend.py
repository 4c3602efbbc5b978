"""The attention that a replaced forward calls: over a cache to generate, or within the texts of a batch to pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.interface.transformers_attention import biased_attention, transformers_attention
from piecegraph.runner.attention.varlen.transformers_varlen import biased_varlen, transformers_varlen

POOLS_ATTRIBUTE = "_piecegraph_pools"
"""The attribute, True, of the modules of a model that pools."""


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    *,
    scaling: float,
    **options: Any,
) -> torch.Tensor:
    """Return the attention of `module`, `[1, num_tokens, num_q_heads, value_dim]`; `options` are the interface's."""
    interface = transformers_varlen if hasattr(module, POOLS_ATTRIBUTE) else transformers_attention
    return interface(module, query, key, value, None, scaling=scaling, **options)[0]


def attend_with_biases(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    slopes: torch.Tensor,  # [num_q_heads] float32 or bfloat16
    *,
    scaling: float,
    slope_scale: float = 1.0,
) -> torch.Tensor:
    """Return the attention of `module` with linear biases, `[1, num_tokens, num_q_heads, value_dim]`."""
    interface = biased_varlen if hasattr(module, POOLS_ATTRIBUTE) else biased_attention
    return interface(module, query, key, value, slopes, scaling=scaling, slope_scale=slope_scale)
