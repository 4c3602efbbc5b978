"""Our attention in transformers' `AttentionInterface`: the function that every model class calls instead of its own.

No mask function is registered under our name: transformers then builds no mask at all and passes
`attention_mask=None`; the kernels apply causality and windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.attention.interface import op as _op  # noqa: F401  (registers the ops)
from piecegraph.runner.attention.interface.latent import LatentKV, absorbed_query, expanded_values

ATTENTION_IMPLEMENTATION = "piecegraph"
"""The value of `attn_implementation` under which a model is loaded."""

_HARMLESS = frozenset(
    {
        "position_ids",  # rotary embeddings are applied by now
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
        "deterministic",
        "logits_to_keep",
    }
)
"""Keyword arguments models pass along that do not change what attention computes."""


CHUNK_SIZE_ATTRIBUTE = "_piecegraph_chunk_size"
"""The attribute of an attention module that holds the tokens of its chunks, which transformers puts into a mask."""

TEMPERATURE_ATTRIBUTE = "_piecegraph_temperature"
"""The attribute of an attention module whose queries grow with their position: the tokens of a step, and the growth."""


POSITIONS_ARGUMENT = "piecegraph_positions"
"""The keyword argument of a model's forward, besides its own, that takes positions `[1, num_tokens]` to attention."""


def needs_positions(model: nn.Module) -> bool:
    """Return whether attention of `model` needs `POSITIONS_ARGUMENT`."""
    return any(TEMPERATURE_ATTRIBUTE in vars(module) for module in model.modules())


def register_attention() -> None:
    """Register `attn_implementation="piecegraph"` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_IMPLEMENTATION, transformers_attention)


def transformers_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor | LatentKV,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor | LatentKV,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    piecegraph_positions: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Call `piecegraph::attention` or another form of it, which tracing puts into the graph as one node.

    Returns `[1, num_tokens, num_q_heads, value_dim]`, and None for the attention weights.
    """
    unsupported = _unsupported(module, attention_mask is not None, dropout, is_causal, kwargs)
    temperature: tuple[int, float] | None = getattr(module, TEMPERATURE_ATTRIBUTE, None)
    if temperature is not None:
        if piecegraph_positions is None:
            unsupported = unsupported or "scales queries by their position, which the model does not hand on."
        else:
            query = _grown(query, piecegraph_positions, *temperature)
    of_layer = (
        float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        int(sliding_window) if sliding_window is not None else 0,
        float(softcap) if softcap is not None else 0.0,
        s_aux,
        unsupported,
        getattr(module, NAME_ATTRIBUTE),
    )
    if isinstance(key, LatentKV):
        return _latent_attention(module, query, key, of_layer), None
    assert not isinstance(value, LatentKV), "keys and values are compressed together"
    query, key, value = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    chunk_size: int = getattr(module, CHUNK_SIZE_ATTRIBUTE, 0)
    if chunk_size:
        torch.ops.piecegraph.chunked_attention.default(query, key, value, out, chunk_size, *of_layer)
    else:
        torch.ops.piecegraph.attention.default(query, key, value, out, *of_layer)
    return out.unsqueeze(0), None


def biased_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    slopes: torch.Tensor,  # [num_q_heads] float32 or bfloat16
    *,
    scaling: float,
    slope_scale: float = 1.0,
) -> torch.Tensor:
    """Call `piecegraph::biased_attention`, which no class of transformers calls by itself.

    Returns `[1, num_tokens, num_q_heads, value_dim]`.
    """
    query, key, value = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
    torch.ops.piecegraph.biased_attention.default(
        query, key, value, out, slopes, slope_scale, scaling, 0, 0.0, None, None, getattr(module, NAME_ATTRIBUTE)
    )
    return out.unsqueeze(0)


def _grown(query: torch.Tensor, positions: torch.Tensor, step: int, growth: float) -> torch.Tensor:
    """Return the query with a scale by position that grows after each `step` tokens (https://arxiv.org/abs/2501.19399).

    `positions` `[1, num_tokens]`.
    """
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / step)) * growth + 1.0
    return (query * scale[:, None, :, None]).to(query.dtype)


def _latent_attention(module: Any, query: torch.Tensor, kv: LatentKV, of_layer: tuple[object, ...]) -> torch.Tensor:
    """Return the attention of a layer with compressed keys, `[1, num_tokens, num_q_heads, value_dim]`."""
    num_heads, rank = query.shape[1], kv.latent.shape[-1]
    weight = module.kv_b_proj.weight.view(num_heads, -1, rank)
    absorbed = absorbed_query(query.squeeze(0), weight, kv.rope.shape[-1])
    key = torch.cat([kv.latent, kv.rope], dim=-1).squeeze(0).transpose(0, 1)
    out = query.new_empty((absorbed.shape[0], num_heads, rank))
    torch.ops.piecegraph.latent_attention.default(absorbed, key, out, *of_layer)
    return expanded_values(out, weight, query.shape[-1] - kv.rope.shape[-1]).unsqueeze(0)


def _unsupported(
    module: nn.Module, has_mask: bool, dropout: float, is_causal: bool | None, kwargs: dict[str, object]
) -> str | None:
    """Return why this call cannot be served, or None."""
    if not has_mask and not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        return (
            "is not causal: every token sees the whole text, so the model is an encoder and generates nothing. "
            "LLM(model, runner='pooling') embeds or classifies texts with it."
        )
    return unsupported_argument(has_mask, dropout, kwargs)


def unsupported_argument(has_mask: bool, dropout: float, kwargs: Mapping[str, object]) -> str | None:
    """Return which argument of a model's call of attention cannot be served, or None."""
    if has_mask:
        return "passes an attention mask of its own; only causal and sliding-window attention can run here."
    if dropout > 0.0:
        return "applies dropout to its attention although the model is in eval mode."
    for name, argument in kwargs.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            return f"passes {name!r} to its attention, which we do not know and therefore cannot honour."
    return None
