"""The shape of an attention layer's heads, for which kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The number, sizes and dtype of an attention layer's heads."""

    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: torch.Tensor, value: torch.Tensor) -> HeadShape:
        """Return the shape for a query `[_, num_q_heads, key_dim]` and a value `[_, num_kv_heads, value_dim]`."""
        return cls(
            num_q_heads=query.shape[1],
            num_kv_heads=value.shape[1],
            key_dim=query.shape[2],
            value_dim=value.shape[2],
            dtype=query.dtype,
        )

    @property
    def group(self) -> int:
        """The number of query heads a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """The larger of the two head sizes, padded to a power of two, as a tile holds it."""
        return max(16, 1 << (max(self.key_dim, self.value_dim) - 1).bit_length())
