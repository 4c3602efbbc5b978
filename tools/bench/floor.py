"""The least a decode step can take: the bytes it must read, and the arithmetic it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.tools.bench.ceilings import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a decode step reads whatever its batch."""

    matmul_params: int  # weights every token is multiplied by, the logits' included
    logits_params: int  # of those, the ones only rows that sample are multiplied by
    weight_bytes: int
    layers: tuple[AttentionLayer, ...]


def floor_seconds(
    size: ModelSize, ceilings: Ceilings, batch_size: int, context: float, prefill_tokens: int = 0
) -> float:
    """Weights read once or multiplied, whichever takes longer, and then every cached key and value read once.

    `context`: tokens each request has, on average over the steps timed. `prefill_tokens` are multiplied by all
    weights but the logits'.
    """
    multiplied = (size.matmul_params - size.logits_params) * (batch_size + prefill_tokens)
    multiplied += size.logits_params * (batch_size + (prefill_tokens > 0))
    matmuls = max(size.weight_bytes / ceilings.read_bytes_per_s, 2 * multiplied / ceilings.flops_per_s)
    return matmuls + cache_bytes(size.layers, batch_size, context) / ceilings.read_bytes_per_s


def cache_bytes(layers: Sequence[AttentionLayer], batch_size: int, context: float) -> float:
    """Bytes of keys and values one decode step reads."""
    return batch_size * sum(
        min(context, layer.window or context)
        * layer.num_kv_heads
        * (layer.key_dim + layer.value_dim)
        * layer.dtype.itemsize
        for layer in layers
    )
