"""How long a text the model's positions allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

_STRETCHING = ("linear", "yarn")
"""Rope types whose `factor` goes beyond `max_position_embeddings`, unless that includes it already."""


def model_length(config: PreTrainedConfig, max_model_len: int | None) -> int:
    """`max_model_len` if the model has that many positions; None: as many as it has. Raises `ConfigError`."""
    limit = position_limit(config)
    if max_model_len is None:
        if limit is None:
            raise ConfigError(f"{type(config).__name__} does not say how long a text may be; give max_model_len.")
        return limit
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len}, but the model's positions end at {limit}. Use at most {limit}, or "
            f'override the model: hf_overrides={{"max_position_embeddings": {max_model_len}}}.'
        )
    return max_model_len


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions, scaled rotary embeddings included [as vLLM derives it]; None if not said."""
    text_config = config.get_text_config(decoder=True)
    limits = [value for name in _NAMES if isinstance(value := getattr(text_config, name, None), int)]
    if not limits:
        return None
    limit = limits[0]
    rope = getattr(text_config, "rope_parameters", None) or {}
    if isinstance(rope, Mapping) and rope.get("rope_type") in _STRETCHING:
        original = rope.get("original_max_position_embeddings")
        stretched = (original or limit) * (rope.get("factor") or 1.0)
        limit = max(limit, int(stretched))
    return limit
