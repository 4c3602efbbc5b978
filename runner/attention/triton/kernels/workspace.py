"""The memory through which the splits of one request are combined: their results, and how many have arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWorkspace:
    """The workspace of all layers and all graphs of a stream; a launch leaves garbage in `out` and `lse` only.

    The tensors are flat: a kernel views them as `[num_reqs, num_q_heads, num_splits]`, with the numbers of its launch.
    """

    out: torch.Tensor  # float32, with a last dimension value_dim: a split's result, normalised
    lse: torch.Tensor  # float32, log2 of a split's sum of weights
    arrivals: torch.Tensor  # int32, a count for each request and block of heads; 0 between launches

    @classmethod
    def allocate(cls, *, num_partials: int, num_values: int, num_counts: int, device: torch.device) -> SplitWorkspace:
        """Allocate a workspace for `num_partials` splits of all heads of all requests, and `num_values` results.

        `num_values` is `num_partials` times value_dim; `num_counts` are the requests times the blocks of heads.
        """
        return cls(
            out=torch.empty(num_values, dtype=torch.float32, device=device),
            lse=torch.empty(num_partials, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_counts, dtype=torch.int32, device=device),
        )
