"""The largest number of tokens of a text that a model's positions allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

_EXTENDING = ("linear", "yarn")
"""Rope types whose `factor` extends `max_position_embeddings`, unless that field includes the factor already."""


def model_length(config: PreTrainedConfig, max_model_len: int | None, first_position: int = 0) -> int:
    """Return `max_model_len`, or for None the number of positions that the model has from `first_position` on.

    Raises `ConfigError` if the model has fewer positions, or if their number is unknown and needed.
    """
    limit = position_limit(config)
    if limit is not None:
        limit -= first_position
    if max_model_len is None:
        if limit is None:
            raise ConfigError(f"{type(config).__name__} has no maximum length of a text; give max_model_len.")
        return limit
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len}, but the model's positions end at {limit}. Use at most {limit}, or "
            f'override the model: hf_overrides={{"max_position_embeddings": {max_model_len + first_position}}}.'
        )
    return max_model_len


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions, with the scaling of rotary embeddings, as vLLM derives it; None if unknown."""
    text_config = config.get_text_config(decoder=True)
    values = [getattr(text_config, name, None) for name in _NAMES]
    limits = [value for value in values if isinstance(value, int) and value > 0]  # XLNet's -1: any number
    if not limits:
        return None
    limit = limits[0]
    rope = getattr(text_config, "rope_parameters", None) or {}
    if isinstance(rope, Mapping) and rope.get("rope_type") in _EXTENDING:
        original = rope.get("original_max_position_embeddings")
        factor = rope.get("factor") or 1.0
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ConfigError(f"rope_parameters has factor={factor!r}; it must be a number above 0. Check config.json.")
        extended = (original or limit) * factor
        limit = max(limit, int(extended))
    return limit
