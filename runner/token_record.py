"""What a step leaves behind in the requests' states: their drawn tokens, and how far they are computed."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenRecord(NamedTuple):
    """The states that a draw writes and reads, by state row; views of `RequestStates`' own."""

    token_ids: torch.Tensor  # [rows, max_model_len] int32, a row's numbers next to each other; written
    prefill_lens: torch.Tensor  # [rows] int32: tokens known when the request was added
    num_computed_tokens: torch.Tensor  # [rows] int32, written


def record_tokens(
    record: TokenRecord, drawn: torch.Tensor, *, idx_mapping: torch.Tensor, positions: torch.Tensor
) -> None:
    """Append `drawn` `[num_reqs]` (any integer type) to the tokens of the requests that sample, and mark every
    request of the batch as computed up to its position.

    `idx_mapping` and `positions` are those of the draw (`gumbel_sample`), which does this itself: what its kernel does,
    in torch. A request samples iff this step reached the end of what was known of it; padded requests are passed over.
    Doing it twice is doing it once: the second time's tokens replace the first's.
    """
    rows, positions = idx_mapping.to(torch.int64), positions.to(torch.int64)
    is_real = rows >= 0
    is_drawn = is_real & (positions >= record.prefill_lens[rows.clamp(min=0)])
    is_drawn &= positions < record.token_ids.shape[1]  # the last token a request may have is not computed
    record.token_ids[rows[is_drawn], positions[is_drawn]] = drawn[is_drawn].to(torch.int32)
    record.num_computed_tokens[rows[is_real]] = positions[is_real].to(torch.int32)
