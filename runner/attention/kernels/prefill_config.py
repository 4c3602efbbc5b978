"""How a launch of the general kernel is laid out: a pure function of what the host knows at capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_GROUP = 128
"""Query heads one KV head may have: they fill a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    block_m: int  # rows a tile: query tokens, each with all query heads of one KV head
    block_n: int  # keys a tile
    num_warps: int
    num_stages: int

    def block_q(self, group: int) -> int:
        """Query tokens a tile."""
        return self.block_m // group


def prefill_config(
    *, max_query_len: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> PrefillConfig:
    """The layout for requests of up to `max_query_len` rows. One of three for a model: few kernels are compiled."""
    dim = max(1 << (key_dim - 1).bit_length(), 1 << (value_dim - 1).bit_length(), 16)
    rows = max_query_len * group
    fitting = 16 if rows <= 16 and group <= 16 else 64 if rows <= 64 and group <= 64 else 128
    if dtype == torch.float32:  # multiplied without tensor cores, out of registers
        return PrefillConfig(
            block_m=max(16, 1 << (group - 1).bit_length()), block_n=16 if dim > 128 else 32, num_warps=4, num_stages=2
        )
    if fitting < 128:
        return PrefillConfig(
            block_m=fitting, block_n=max(16, min(64, 8192 // dim)), num_warps=4, num_stages=3 if dim <= 128 else 2
        )
    return PrefillConfig(block_m=128, block_n=64 if dim <= 128 else 32, num_warps=8, num_stages=3 if dim <= 128 else 2)


def prefill_configs(*, group: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[PrefillConfig, ...]:
    """Every layout `prefill_config` may choose for such a layer."""
    return tuple(
        dict.fromkeys(
            prefill_config(max_query_len=n, group=group, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
            for n in (1, 16 // group or 1, 64 // group or 1, 129)
        )
    )
