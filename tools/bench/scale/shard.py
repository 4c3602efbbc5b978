"""The share of a model that one rank of tensor parallelism has, as a model of its own.

Its steps have what ranks divide (linears, heads, the vocabulary) divided, all that each rank does whole (norms,
embeddings' rows, calls of ops, the host's work), and no collectives.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""The sizes of a config that ranks divide where they have them."""

STATE_FIELDS = ("mamba_", "ssm_", "linear_", "conv_")
"""How fields of configs begin that describe layers with a state."""


def shard_config(config: PretrainedConfig, num_ranks: int) -> PretrainedConfig:
    """Return the config of what one of `num_ranks` ranks computes; KV heads fewer than ranks are held by several.

    Raises `ConfigError` for sizes that do not divide, for models of several parts or with experts, and for those that
    tensor parallelism does not divide: with layers that keep a state, or latent attention.
    """
    if config.get_text_config(decoder=True) is not config:
        raise ConfigError(f"the shard of a {config.model_type} has no config: it is a model of several parts.")
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise ConfigError(f"the shard of a {config.model_type} is not made here: its layers have experts.")
    undivided = _undivided(config)
    if undivided:
        raise ConfigError(f"the shard of a {config.model_type} is not made: tensor parallelism divides no {undivided}.")
    shard = copy.deepcopy(config)
    shard.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in DIVIDED:
        size = getattr(config, name, None)
        if size is None:
            continue
        if name == "num_key_value_heads" and num_ranks % size == 0:
            setattr(shard, name, 1)
        elif size % num_ranks:
            raise ConfigError(
                f"{name}={size} does not divide by {num_ranks} ranks, so there is no config of a rank's share; give "
                "another number of ranks."
            )
        else:
            setattr(shard, name, size // num_ranks)
    return shard


def _undivided(config: PretrainedConfig) -> str:
    """Return what a model has that ranks do not divide, or "" if nothing is known."""
    if getattr(config, "num_attention_heads", None) is None:
        return "model without attention heads"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention"
    kinds = getattr(config, "layer_types", None) or ()
    has_states = any(name.startswith(STATE_FIELDS) for name in config.to_dict())
    return "layers that keep a state" if has_states or any("attention" not in kind for kind in kinds) else ""


def shard_folder(config: PretrainedConfig, num_ranks: int, scratch: Path) -> Path:
    """Write the config of a rank's share to a new folder in `scratch` and return the folder. Raises as `shard_config`.

    The folder has no weights: load it with `load_format="dummy"`.
    """
    folder = scratch / f"shard-of-{num_ranks}"
    shard_config(config, num_ranks).save_pretrained(str(folder))
    return folder
