"""The steps between a projection and attention: an optional norm over each head, and rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The norm and the rotary embedding that query and key of one layer still need.

    Both are computed in float32 and rounded once. A head is normed as a whole, `x / rms(x) * (norm_offset + weight)`;
    then its first `rotary_dim` numbers are rotated, half against half: `x * cos + cat(-x[half:], x[:half]) * sin`. The
    remaining numbers stay as they are.
    """

    cos: torch.Tensor  # [>= num_tokens, rotary_dim], a row's numbers adjacent
    sin: torch.Tensor  # the same
    q_norm_weight: torch.Tensor | None = None  # [key_dim], None for no factor
    k_norm_weight: torch.Tensor | None = None
    norm_eps: float | None = None  # None: no norm
    norm_offset: float = 0.0

    @property
    def dim(self) -> int:
        """The number of values of a head that are rotated: even, at most all."""
        return self.cos.shape[1]
