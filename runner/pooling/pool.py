"""From the hidden states of a flattened batch to one row per sequence. Nothing here waits for the device."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch


class PoolingType(enum.Enum):
    """The row that stands for a sequence; the means are over all of its tokens, special tokens included."""

    CLS = "cls"  # the first token's
    LAST = "last"
    MEAN = "mean"
    MAX = "max"  # of each dimension
    MEAN_SQRT_LEN = "mean_sqrt_len"  # the sum over the square root of the number of tokens
    WEIGHTED_MEAN = "weighted_mean"  # token i weighs i + 1


def pool(
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    query_start_loc: torch.Tensor,  # [num_seqs + 1] int32
    kinds: Sequence[PoolingType],
) -> torch.Tensor:
    """Return the rows of all sequences, `[num_seqs, hidden_size * len(kinds)]` float32, concatenated in order.

    A sequence may be empty, as padding is; its row is undefined.
    """
    rows = [_pool(hidden_states, query_start_loc, kind) for kind in kinds]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _pool(hidden_states: torch.Tensor, query_start_loc: torch.Tensor, kind: PoolingType) -> torch.Tensor:
    starts = query_start_loc.to(torch.int64)
    if kind in (PoolingType.CLS, PoolingType.LAST):
        at = starts[:-1] if kind is PoolingType.CLS else starts[1:] - 1
        return hidden_states[at.clamp(0, hidden_states.shape[0] - 1)].float()
    values = hidden_states.float()
    if kind is PoolingType.MAX:
        return _reduced(values, "max", starts)
    lengths = starts.diff().clamp(min=1)[:, None].float()
    if kind is PoolingType.WEIGHTED_MEAN:
        tokens = torch.arange(len(values), device=values.device)
        numbers = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]  # of each token in its sequence
        values = values * (numbers[:, None] + 1)
        lengths = lengths * (lengths + 1) / 2
    elif kind is PoolingType.MEAN_SQRT_LEN:
        lengths = lengths.sqrt()
    return _reduced(values, "sum", starts) / lengths


def _reduced(values: torch.Tensor, how: str, starts: torch.Tensor) -> torch.Tensor:
    """Return each sequence's reduced rows; the order of a sum is fixed, and does not depend on other sequences."""
    return torch.segment_reduce(values, how, offsets=starts, axis=0, unsafe=True)  # unsafe: a check would wait
