"""One call of an attention op: the arguments of either by name, query and key of one still to be rotated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from piecegraph.runner.attention.rotary import Rotary

ATTENTION_OP = "piecegraph::attention"
ROPE_ATTENTION_OP = "piecegraph::rope_attention"
ATTENTION_OPS = (ATTENTION_OP, ROPE_ATTENTION_OP)

_LAYER_ARGUMENTS = "float scale, int window, float softcap, Tensor? sinks, str? unsupported, str layer"
# `layer` is the only argument in which equal layers differ. It stays the last, and `unsupported` carries
# the reason a layer cannot run, as data: an exception raised while Dynamo traces would lose its type.
SCHEMAS = (
    f"attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, {_LAYER_ARGUMENTS}) -> ()",
    "rope_attention(Tensor(a!) query, Tensor key, Tensor value, Tensor(b!) out, Tensor cos, Tensor sin, "
    f"Tensor? q_norm_weight, Tensor? k_norm_weight, float? norm_eps, float norm_offset, {_LAYER_ARGUMENTS}) -> ()",
)


class AttentionCall(NamedTuple):
    """What either op computes: causal attention of one layer over the current forward context's cache and batch.

    Mutates `out` and the layer's cache. Key `j` is visible from query `i` iff `j <= i` and, with a window,
    `j > i - window` (transformers' meaning). With `rotary` the cache gets keys that are rotated, and rows of `query`
    may be overwritten. Of a traced graph, tensors are what the graph says of them.
    """

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], written
    rotary: Rotary | None  # what query and key still need: they are as projected
    scale: float
    window: int  # 0: none
    softcap: float  # 0.0: none
    sinks: torch.Tensor | None  # [num_q_heads]
    unsupported: str | None  # why the layer cannot run
    layer: str  # its name


def attention_call(*args: Any) -> AttentionCall:
    """Of the arguments of `piecegraph::attention`."""
    query, key, value, out, *layer = args
    return AttentionCall(query, key, value, out, None, *layer)


def rope_attention_call(*args: Any) -> AttentionCall:
    """Of the arguments of `piecegraph::rope_attention`: those of the rotary embedding, and of the norm before it if
    `norm_eps` is one, stand in the middle."""
    query, key, value, out, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_offset, *layer = args
    rotary = Rotary(
        cos=cos,
        sin=sin,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
    )
    return AttentionCall(query, key, value, out, rotary, *layer)


def call_of(op: str, args: Sequence[Any]) -> AttentionCall:
    """Of the arguments of the op of that name, one of `ATTENTION_OPS`."""
    return rope_attention_call(*args) if op == ROPE_ATTENTION_OP else attention_call(*args)
