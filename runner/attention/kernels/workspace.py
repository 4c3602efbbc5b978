"""The memory in which splits of one request meet: what each found, and how many have arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWorkspace:
    """Shared by all layers and all graphs of a stream: each launch leaves it as it found it, except `out` and `lse`.

    Flat: a kernel lays `[num_reqs, num_q_heads, num_splits]` over it, with its own numbers.
    """

    out: torch.Tensor  # float32, [..., value_dim] too: a split's result, normalised
    lse: torch.Tensor  # float32, log2 of a split's sum of weights
    arrivals: torch.Tensor  # int32, a count for each request and block of heads; 0 between launches

    @classmethod
    def allocate(cls, *, num_partials: int, num_values: int, num_counts: int, device: torch.device) -> SplitWorkspace:
        """`num_partials`: splits of all heads of all requests; `num_values`: the same times value_dim."""
        return cls(
            out=torch.empty(num_values, dtype=torch.float32, device=device),
            lse=torch.empty(num_partials, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_counts, dtype=torch.int32, device=device),
        )
