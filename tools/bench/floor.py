"""The least a decode step can take: the bytes it must read, and the arithmetic it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.tools.bench.ceilings import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a decode step reads: all of it whatever its batch, but for routed experts."""

    matmul_params: int  # weights every token is multiplied by, the logits' included
    logits_params: int  # of those, the ones only rows that sample are multiplied by
    weight_bytes: int
    layers: tuple[AttentionLayer, ...]
    experts: RoutedExperts | None = None

    def bytes_read(self, num_tokens: float) -> float:
        """Of weights, by a step of so many tokens: of routed experts, those that some token chose."""
        if self.experts is None:
            return self.weight_bytes
        return self.weight_bytes - self.experts.num_bytes * (1 - self.experts.share_hit(num_tokens))

    @property
    def params_a_token(self) -> float:
        """What a token is multiplied by, the logits' apart."""
        idle = self.experts.params * (1 - self.experts.share_hit(1)) if self.experts is not None else 0.0
        return self.matmul_params - self.logits_params - idle


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Of all layers; part of their model's weights."""

    params: int
    num_bytes: int
    num_experts: int  # of a layer
    top_k: int  # that a token chooses

    def share_hit(self, num_tokens: float) -> float:
        """How many of the experts some token chooses, on average, if each chooses evenly and by itself."""
        return float(1 - (1 - self.top_k / self.num_experts) ** num_tokens)


def floor_seconds(
    size: ModelSize, ceilings: Ceilings, batch_size: int, context: float, prefill_tokens: int = 0
) -> float:
    """Weights read once or multiplied, whichever takes longer, and then every cached key and value read once.

    `context`: tokens each request has, on average over the steps timed. `prefill_tokens` are multiplied by all
    weights but the logits'.
    """
    num_tokens = batch_size + prefill_tokens
    multiplied = size.params_a_token * num_tokens
    multiplied += size.logits_params * (batch_size + (prefill_tokens > 0))
    matmuls = max(size.bytes_read(num_tokens) / ceilings.read_bytes_per_s, 2 * multiplied / ceilings.flops_per_s)
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
