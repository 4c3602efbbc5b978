"""The least time a decode step can take: the bytes it must read, and the arithmetic it must do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.tools.bench.measure.ceilings import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The weights that a decode step reads: all of them at every batch size, except routed experts."""

    matmul_params: int  # weights every token is multiplied by, the logits' included
    logits_params: int  # of those, the ones only rows that sample are multiplied by
    weight_bytes: int
    layers: tuple[AttentionLayer, ...]
    experts: RoutedExperts | None = None

    def bytes_read(self, num_tokens: float) -> float:
        """Return the bytes of weights that a step of `num_tokens` tokens reads; of routed experts, only the chosen
        ones.
        """
        if self.experts is None:
            return self.weight_bytes
        return self.weight_bytes - self.experts.num_bytes * (1 - self.experts.share_hit(num_tokens))

    @property
    def params_a_token(self) -> float:
        """The number of parameters that a token is multiplied by, except those of the logits."""
        idle = self.experts.params * (1 - self.experts.share_hit(1)) if self.experts is not None else 0.0
        return self.matmul_params - self.logits_params - idle


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The routed experts of all layers, a part of their model's weights."""

    params: int
    num_bytes: int
    num_experts: int  # of a layer
    top_k: int  # that a token chooses

    def share_hit(self, num_tokens: float) -> float:
        """Return the mean share of experts that some token chooses, if every token chooses uniformly and
        independently.
        """
        return float(1 - (1 - self.top_k / self.num_experts) ** num_tokens)


def floor_seconds(
    size: ModelSize, ceilings: Ceilings, batch_size: int, context: float, prefill_tokens: int = 0
) -> float:
    """Return the seconds to read or multiply all weights, whichever takes longer, and to read the cache once.

    `context` is the mean number of tokens of a request over the timed steps. `prefill_tokens` are multiplied by all
    weights except those of the logits.
    """
    num_tokens = batch_size + prefill_tokens
    multiplied = size.params_a_token * num_tokens
    multiplied += size.logits_params * (batch_size + (prefill_tokens > 0))
    matmuls = max(size.bytes_read(num_tokens) / ceilings.read_bytes_per_s, 2 * multiplied / ceilings.flops_per_s)
    return matmuls + cache_bytes(size.layers, batch_size, context) / ceilings.read_bytes_per_s


def cache_bytes(layers: Sequence[AttentionLayer], batch_size: int, context: float) -> float:
    """Return the bytes of keys and values that one decode step reads, each in the dtype that it is kept in.

    Values that are the beginning of keys are read with them.
    """
    return batch_size * sum(
        keys_seen(layer.cache_spec.reach, context) * layer.cache_spec.page_bytes(1) for layer in layers
    )


def keys_seen(reach: Reach, context: float) -> float:
    """Return how many of `context` tokens, its own included, the query of the last one sees.

    In a layer with chunks it sees its own chunk. A `context` that is a mean over steps is taken as that of one step,
    which is exact unless a chunk begins during the steps.
    """
    if reach.chunk_size:
        return context - max(math.ceil(context / reach.chunk_size) - 1, 0) * reach.chunk_size
    return min(context, reach.window or context)
