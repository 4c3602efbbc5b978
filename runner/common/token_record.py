"""The record of a step in the requests' states: sampled tokens and numbers of computed tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenRecord(NamedTuple):
    """The states that sampling reads and writes, by state row; views of the tensors of `RequestStates`."""

    token_ids: torch.Tensor  # [rows, max_model_len] int32, a row's numbers next to each other; written
    prefill_lens: torch.Tensor  # [rows] int32: tokens known when the request was added
    num_computed_tokens: torch.Tensor  # [rows] int32, written


def record_tokens(
    record: TokenRecord, drawn: torch.Tensor, *, idx_mapping: torch.Tensor, positions: torch.Tensor
) -> None:
    """Append `drawn` `[num_reqs]` (any integer type) to the tokens of the requests that sample, and mark every
    request of the batch as computed up to its position.

    This is the torch reference of what the kernel of `gumbel_sample` does; `idx_mapping` and `positions` are its
    arguments. A request samples iff this step reached the end of its known tokens; padded requests are skipped.
    Idempotent: the tokens of a second call replace those of the first. Mutates the tensors of `record`.
    """
    rows, positions = idx_mapping.to(torch.int64), positions.to(torch.int64)
    is_real = rows >= 0
    is_drawn = is_real & (positions >= record.prefill_lens[rows.clamp(min=0)])
    is_drawn &= positions < record.token_ids.shape[1]  # the last token that a request may have is not recorded
    record.token_ids[rows[is_drawn], positions[is_drawn]] = drawn[is_drawn].to(torch.int32)
    record.num_computed_tokens[rows[is_real]] = positions[is_real].to(torch.int32)
