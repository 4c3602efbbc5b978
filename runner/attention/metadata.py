"""What attention knows of a step's batch, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

PAD_SLOT_ID = -1
"""A token with this slot is padding: its key and value are written nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """A flattened, ragged batch over a paged cache. Backends extend it with what their kernels need.

    Request `r` owns rows `query_start_loc[r]:query_start_loc[r + 1]`; they are the last of its
    `seq_lens[r]` tokens. Rows from `query_start_loc[num_reqs]` on are padding. The `_cpu` fields say
    the same on the host, so that building a launch never waits for the device.
    """

    num_reqs: int
    num_tokens: int  # rows of the batch, padding included
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, tokens of each request after this step
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, PAD_SLOT_ID for padding
    query_start_loc_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    block_table_cpu: torch.Tensor  # [num_reqs, max_blocks] int64
    slot_mapping_cpu: torch.Tensor  # [num_tokens] int64

    @property
    def query_lens_cpu(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.query_start_loc_cpu))
