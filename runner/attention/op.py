"""`piecegraph::attention`: the op a model's graph is cut at; and `piecegraph::rope_attention`, the wider form of it.

It writes this step's keys and values into the paged cache, attends, and writes the result into `out`,
a buffer of its caller's. The wider form is given query and key before their norm and rotary embedding, and
does both on the way; the pass `fuse-rope-kv-write` puts it into graphs. Both are defined through
`torch.library.Library` (a call costs 3-4 us, `custom_op` 23-40) and always called as `.default`: dead-code
elimination drops the overload packet, mutating or not.
"""

from __future__ import annotations

import torch

from piecegraph.compiler.graphs.prepared_ops import Launch, register_prepare
from piecegraph.runner.attention.group_launch import launch_of_group
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.attention.rotary import Rotary
from piecegraph.runner.forward_context import get_forward_context

ATTENTION_OP = "piecegraph::attention"
ROPE_ATTENTION_OP = "piecegraph::rope_attention"
ATTENTION_OPS = (ATTENTION_OP, ROPE_ATTENTION_OP)
"""Each takes query, key, value and `out` first, and `scale` to `layer` last (`LAYER_ARGUMENTS`)."""

LAYER_ARGUMENTS = 6
"""How many arguments an op ends with that say what the layer is: scale, window, softcap, sinks, unsupported, layer."""

_library = torch.library.Library("piecegraph", "FRAGMENT")
# `layer` is the only argument in which equal layers differ. It stays the last, and `unsupported` carries
# the reason a layer cannot run, as data: an exception raised while Dynamo traces would lose its type.
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, float scale, int window, float softcap, "
    "Tensor? sinks, str? unsupported, str layer) -> ()"
)
_library.define(
    "rope_attention(Tensor(a!) query, Tensor key, Tensor value, Tensor(b!) out, Tensor cos, Tensor sin, "
    "Tensor? q_norm_weight, Tensor? k_norm_weight, float? norm_eps, float norm_offset, float scale, int window, "
    "float softcap, Tensor? sinks, str? unsupported, str layer) -> ()"
)


def attention(
    query: torch.Tensor,  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor,  # [num_tokens, num_q_heads, value_dim], written
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,  # [num_q_heads]
    unsupported: str | None,
    layer: str,
) -> None:
    """Causal attention of one layer over the current forward context's cache and batch.

    Mutates `out` and the layer's cache. Key `j` is visible from query `i` iff `j <= i` and, with a
    window, `j > i - window` (transformers' meaning).
    """
    _forward(query, key, value, out, None, scale, window, softcap, sinks, unsupported, layer)


def rope_attention(
    query: torch.Tensor,  # [num_tokens, num_q_heads, key_dim], as projected; scratch afterwards
    key: torch.Tensor,  # [num_tokens, num_kv_heads, key_dim], as projected
    value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor,  # [num_tokens, num_q_heads, value_dim], written
    cos: torch.Tensor,  # [num_tokens, rotary_dim], of a float dtype of its own; rotary_dim even, at most key_dim
    sin: torch.Tensor,  # the same
    q_norm_weight: torch.Tensor | None,  # [key_dim]
    k_norm_weight: torch.Tensor | None,  # [key_dim]
    norm_eps: float | None,  # None: no norm
    norm_offset: float,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,  # [num_q_heads]
    unsupported: str | None,
    layer: str,
) -> None:
    """`attention` of query and key that are normed and rotated first (`Rotary` says how).

    Mutates `out` and the layer's cache, which gets keys that are rotated; rows of `query` may be overwritten.
    """
    rotary = Rotary(
        cos=cos,
        sin=sin,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
    )
    _forward(query, key, value, out, rotary, scale, window, softcap, sinks, unsupported, layer)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rotary: Rotary | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    unsupported: str | None,
    layer: str,
) -> None:
    assert unsupported is None, unsupported
    context = get_forward_context()
    context.impl.forward(
        query,
        key,
        value,
        out,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        kv_cache=context.kv_caches[layer],
        metadata=context.metadata_of(layer),
        rotary=rotary,
    )


def _fake(*args: object) -> None:
    return None


_library.impl("attention", attention, "CompositeExplicitAutograd")
_library.impl("rope_attention", rope_attention, "CompositeExplicitAutograd")
for _op in ATTENTION_OPS:
    torch.library.register_fake(_op, _fake, lib=_library)


def _prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    unsupported: str | None,
    layer: str,
) -> Launch | str:
    """A layer of a PIECEWISE bucket bound to its buffers and its cache, by the backend of the capture."""
    return _bound(query, key, value, out, None, scale, window, softcap, sinks, unsupported, layer)


def _prepare_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float | None,
    norm_offset: float,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    unsupported: str | None,
    layer: str,
) -> Launch | str:
    rotary = Rotary(
        cos=cos,
        sin=sin,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
    )
    return _bound(query, key, value, out, rotary, scale, window, softcap, sinks, unsupported, layer)


def _bound(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rotary: Rotary | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    unsupported: str | None,
    layer: str,
) -> Launch | str:
    assert unsupported is None, unsupported
    context = get_forward_context()
    launch = context.impl.prepare(
        query,
        key,
        value,
        out,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        kv_cache=context.kv_caches[layer],
        rotary=rotary,
    )
    if isinstance(launch, str) or not context.group_metadata:
        return launch
    return launch_of_group(launch, context.group_of[layer])


def _metadata_of_launches() -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Read once a replay, for all layers: where there are several groups, a launch picks its own's."""
    context = get_forward_context()
    return context.group_metadata or context.metadata


register_prepare(ATTENTION_OP, _prepare, _metadata_of_launches)
register_prepare(ROPE_ATTENTION_OP, _prepare_rope, _metadata_of_launches)
