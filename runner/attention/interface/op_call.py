"""One call of an attention op with its arguments by name, for all forms of the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from piecegraph.compiler.splitting.plan import TensorSpec
from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.rotary import Rotary

ATTENTION_OP = "piecegraph::attention"
ROPE_ATTENTION_OP = "piecegraph::rope_attention"
LATENT_ATTENTION_OP = "piecegraph::latent_attention"
CHUNKED_ATTENTION_OP = "piecegraph::chunked_attention"
BIASED_ATTENTION_OP = "piecegraph::biased_attention"
ATTENTION_OPS = (ATTENTION_OP, ROPE_ATTENTION_OP, LATENT_ATTENTION_OP, CHUNKED_ATTENTION_OP, BIASED_ATTENTION_OP)

_LAYER_ARGUMENTS = "float scale, int window, float softcap, Tensor? sinks, str? unsupported, str layer"
# `layer` is the only argument in which equal layers differ. It stays the last, and `unsupported` carries
# the reason a layer cannot run, as data: an exception raised while Dynamo traces would lose its type.
SCHEMAS = (
    f"attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, {_LAYER_ARGUMENTS}) -> ()",
    "rope_attention(Tensor(a!) query, Tensor key, Tensor value, Tensor(b!) out, Tensor cos, Tensor sin, "
    f"Tensor? q_norm_weight, Tensor? k_norm_weight, float? norm_eps, float norm_offset, {_LAYER_ARGUMENTS}) -> ()",
    f"latent_attention(Tensor query, Tensor key, Tensor(a!) out, {_LAYER_ARGUMENTS}) -> ()",
    "chunked_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int chunk_size, "
    f"{_LAYER_ARGUMENTS}) -> ()",
    "biased_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor slopes, float slope_scale, "
    f"{_LAYER_ARGUMENTS}) -> ()",
)


class AttentionCall(NamedTuple):
    """Causal attention of one layer, without its cache and its batch: the arguments of any of the ops.

    Running a call mutates `out` and the layer's cache. Key `j` is visible from query `i` iff `j <= i` and, with a
    window, `j > i - window` (transformers' meaning), with chunks, `j // chunk_size == i // chunk_size`. With `rotary`
    the cache gets rotated keys, and rows of `query` may be overwritten. With `slopes`, `position_bias` is added to the
    scores of a key by its position. In a call that is read from a traced graph, each tensor is its `TensorSpec`.
    """

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]; a head's numbers are adjacent, heads may lie anywhere
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], contiguous, written
    scale: float
    window: int = 0  # keys a query sees, itself included; 0: no window
    softcap: float = 0.0  # 0.0: none
    sinks: torch.Tensor | None = None  # [num_q_heads]
    unsupported: str | None = None  # the reason the layer cannot run, or None
    layer: str = ""  # the layer's name
    rotary: Rotary | None = None  # what query and key still need; None: nothing
    is_latent: bool = False  # the value is the beginning of the key, and the cache keeps keys only
    chunk_size: int = 0  # tokens of a chunk; 0: no chunks
    slopes: torch.Tensor | None = None  # [num_q_heads] float32 or bfloat16, of the bias by position; None: no bias
    slope_scale: float = 1.0  # the bias is multiplied by it

    @property
    def reach(self) -> Reach:
        """How far back queries see."""
        return Reach(self.window, self.chunk_size)


def attention_call(*args: Any) -> AttentionCall:
    """Return the call with the arguments of `piecegraph::attention`."""
    return AttentionCall(*args)


def rope_attention_call(*args: Any) -> AttentionCall:
    """Return the call with the arguments of `piecegraph::rope_attention`.

    The arguments of the rotary embedding, and of the norm before it unless `norm_eps` is None, stand in the middle.
    """
    query, key, value, out, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_offset, *rest = args
    rotary = Rotary(
        cos=cos,
        sin=sin,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
    )
    return attention_call(query, key, value, out, *rest, rotary)


def latent_attention_call(*args: Any) -> AttentionCall:
    """Return the call with the arguments of `piecegraph::latent_attention`.

    The key `[num_tokens, 1, key_dim]` of a token serves all heads, and begins with its value, which is as large as a
    row of a head in `out`.
    """
    query, key, out, *rest = args
    value_dim = out.shape[2]
    value = replace(key, shape=(*key.shape[:2], value_dim)) if isinstance(key, TensorSpec) else key[..., :value_dim]
    return attention_call(query, key, value, out, *rest)._replace(is_latent=True)


def chunked_attention_call(*args: Any) -> AttentionCall:
    """Return the call with the arguments of `piecegraph::chunked_attention`."""
    query, key, value, out, chunk_size, *rest = args
    return attention_call(query, key, value, out, *rest)._replace(chunk_size=chunk_size)


def biased_attention_call(*args: Any) -> AttentionCall:
    """Return the call with the arguments of `piecegraph::biased_attention`."""
    query, key, value, out, slopes, slope_scale, *rest = args
    return attention_call(query, key, value, out, *rest)._replace(slopes=slopes, slope_scale=slope_scale)


def position_bias(slopes: torch.Tensor, slope_scale: float, positions: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of keys at `positions` (https://arxiv.org/abs/2108.12409).

    `positions` `[..., num_keys]` int64; the result is `[..., num_q_heads, num_keys]` float32. A number that the keys of
    a query share changes no weight, so that float32 slopes count from the last key, which keeps numbers small. Products
    of bfloat16 slopes are rounded to it, and that depends on the position itself.
    """
    if slopes.dtype is torch.float32:
        positions = positions - positions[..., -1:]
    return (slopes[:, None] * positions[..., None, :]).float() * slope_scale


_CALLS = {
    ATTENTION_OP: attention_call,
    ROPE_ATTENTION_OP: rope_attention_call,
    LATENT_ATTENTION_OP: latent_attention_call,
    CHUNKED_ATTENTION_OP: chunked_attention_call,
    BIASED_ATTENTION_OP: biased_attention_call,
}


def call_of(op: str, args: Sequence[Any]) -> AttentionCall:
    """Return the call with the arguments of the op named `op`, one of `ATTENTION_OPS`."""
    return _CALLS[op](*args)
