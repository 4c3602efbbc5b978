"""A model's attention layers, read from the traced graph: no model family's config is consulted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from piecegraph.compiler.splitting.plan import SplitCall, TensorSpec
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.cache_spec import CacheSpec, CacheTensor
from piecegraph.runner.attention.interface.op_call import ATTENTION_OPS, call_of
from piecegraph.runner.scheduling.kv_cache_group import CacheKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The shape and the options of one attention module."""

    name: str  # the module's name in the model, e.g. "model.layers.3.self_attn"
    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int  # keys a query sees, itself included; 0: all before it
    softcap: float  # 0.0: none
    has_sinks: bool
    is_latent: bool = False  # the value is the beginning of the key, which alone is cached
    chunk_size: int = 0  # tokens of a chunk, of which a query sees its own; 0: no chunks
    has_slopes: bool = False  # a bias by position is added to the scores of keys (ALiBi)
    cache_dtype: torch.dtype | None = None  # in which keys and values are kept; None: `dtype`

    @property
    def unshiftable_reason(self) -> str | None:
        """Return why no constant may be subtracted from all keys of a head (Note [keys less a constant]), or None."""
        if self.softcap:
            return "caps its scores"
        if self.has_sinks:
            return "has sinks, whose scores are fixed"
        return "keeps latents, whose values are part of its keys" if self.is_latent else None

    @property
    def cache_spec(self) -> CacheSpec:
        """Return what the layer keeps of all tokens, a window or a chunk: keys and values, or one vector for both."""
        dtype = self.cache_dtype or self.dtype
        key = CacheTensor(
            name="latent" if self.is_latent else "key", shape=(self.num_kv_heads, self.key_dim), dtype=dtype
        )
        value = CacheTensor(name="value", shape=(self.num_kv_heads, self.value_dim), dtype=dtype)
        whole = CacheKind.LATENT if self.is_latent else CacheKind.CHUNKED if self.chunk_size else CacheKind.FULL
        return CacheSpec(
            kind=CacheKind.SLIDING if self.window else whole,
            tensors=(key,) if self.is_latent else (key, value),
            values_in_keys=self.value_dim if self.is_latent else None,
            window=self.window,
            chunk_size=self.chunk_size,
        )


def attention_layers(calls: Sequence[SplitCall], *, keeps_fp8: bool = False) -> tuple[AttentionLayer, ...]:
    """Return the attention layers of a graph's split calls, in the order the model runs them.

    `keeps_fp8`: keys and values are kept in e4m3, and not in the dtype that each layer computes in.

    Raises `UnsupportedModel` if a layer asks for what our attention cannot do, or runs twice a step
    (its second call would overwrite the keys of its first).
    """
    layers: dict[str, AttentionLayer] = {}
    for call in calls:
        if call.op not in ATTENTION_OPS:
            continue
        layer = _attention_layer(call)
        if layer.name in layers:
            raise UnsupportedModel(
                f"{layer.name} runs more than once in a forward pass; its second call would overwrite the keys and "
                "values of its first. It would need a layer of the cache for each call; models that share one "
                "attention module between layers cannot run here."
            )
        layers[layer.name] = replace(layer, cache_dtype=torch.float8_e4m3fn) if keeps_fp8 else layer
    return tuple(layers.values())


def _attention_layer(call: SplitCall) -> AttentionLayer:
    arguments = call_of(call.op, call.args)
    query, key, value, name = *(_spec(each) for each in arguments[:3]), arguments.layer
    if arguments.unsupported:
        raise UnsupportedModel(f"{name}: {arguments.unsupported}")
    if arguments.sinks is not None and arguments.slopes is not None:
        # `position_bias` moves the scores of keys, and that of a sink stays
        raise UnsupportedModel(f"{name}: it has both sinks and a bias by position, which cannot run together here.")
    return AttentionLayer(
        name=name,
        num_q_heads=_static(query, 1, name),
        num_kv_heads=_static(key, 1, name),
        key_dim=_static(key, 2, name),
        value_dim=_static(value, 2, name),
        dtype=key.dtype,
        scale=float(arguments.scale),
        window=int(arguments.window),
        softcap=float(arguments.softcap),
        has_sinks=arguments.sinks is not None,
        is_latent=arguments.is_latent,
        chunk_size=arguments.chunk_size,
        has_slopes=arguments.slopes is not None,
    )


def _spec(found: object) -> TensorSpec:
    assert isinstance(found, TensorSpec), found
    return found


def _static(spec: TensorSpec, dim: int, name: str) -> int:
    size = spec.shape[dim]
    if not isinstance(size, int):
        raise UnsupportedModel(f"{name}: its number of heads or head size varies with the batch ({spec.shape}).")
    return size
