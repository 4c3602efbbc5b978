"""`piecegraph::attention`: the op a model's graph is cut at.

It writes this step's keys and values into the paged cache, attends, and writes the result into `out`,
a buffer of its caller's. Defined through `torch.library.Library` (a call costs 3-4 us, `custom_op`
23-40) and always called as `.default`: dead-code elimination drops the overload packet, mutating or not.
"""

from __future__ import annotations

import torch

from piecegraph.compiler.graphs.prepared_ops import Launch, register_prepare
from piecegraph.runner.attention.group_launch import launch_of_group
from piecegraph.runner.attention.metadata import AttentionMetadata
from piecegraph.runner.forward_context import get_forward_context

ATTENTION_OP = "piecegraph::attention"

_library = torch.library.Library("piecegraph", "FRAGMENT")
# `layer` is the only argument in which equal layers differ. It stays the last, and `unsupported` carries
# the reason a layer cannot run, as data: an exception raised while Dynamo traces would lose its type.
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, float scale, int window, float softcap, "
    "Tensor? sinks, str? unsupported, str layer) -> ()"
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
    )


def _attention_fake(
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
) -> None:
    return None


_library.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake(ATTENTION_OP, _attention_fake, lib=_library)


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
    )
    if isinstance(launch, str) or not context.group_metadata:
        return launch
    return launch_of_group(launch, context.group_of[layer])


def _metadata_of_launches() -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Read once a replay, for all layers: where there are several groups, a launch picks its own's."""
    context = get_forward_context()
    return context.group_metadata or context.metadata


register_prepare(ATTENTION_OP, _prepare, _metadata_of_launches)
