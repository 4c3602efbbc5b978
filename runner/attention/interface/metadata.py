"""The description of a step's batch that attention reads, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from piecegraph.runner.attention.interface.cache_spec import Reach

PAD_SLOT_ID = -1
"""The slot of a padding token: no key and value are written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """A step's batch as the host knows it, for backends that plan their calls on the host."""

    query_start_loc: tuple[int, ...]  # num_reqs + 1
    seq_lens: tuple[int, ...]  # num_reqs
    block_table: torch.Tensor  # [num_reqs, max_blocks] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    reaches: frozenset[Reach] | None = None  # those of the layers this is for; None: any may occur
    rows: tuple[int, ...] = ()  # num_reqs, the state rows; known if states can be taken back
    prefill_lens: tuple[int, ...] = ()  # num_reqs, the positions from which requests decode; known with `rows`

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The number of rows of each request."""
        return tuple(end - start for start, end in pairwise(self.query_start_loc))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """A flattened, ragged batch over a paged cache. Backends extend it with what their kernels need.

    Request `r` owns rows `query_start_loc[r]:query_start_loc[r + 1]`; they are the last of its
    `seq_lens[r]` tokens. Rows from `query_start_loc[num_reqs]` on are padding.

    Under a FULL graph the tensors are fixed buffers, refilled before each replay, and the numbers
    hold for the bucket: `num_reqs` counts padded requests too, which come last and have no rows and
    a `seq_lens` of 0, whatever their row of `block_table` holds.

    Layers with the same window share a block table. If all of a model's layers have a window, or there are
    several groups of layers, the blocks before a request's window are freed: their entries in `block_table` are
    numbers of blocks that may belong to another request by now.
    """

    num_reqs: int
    num_tokens: int  # rows of the batch, padding included
    max_query_len: int  # no request has more rows
    num_decode_reqs: int  # requests with one row each, before all others
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, tokens of each request after this step
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, PAD_SLOT_ID for padding
    host: HostBatch | None  # None in graphs, and where the backend does not ask for one (`needs_host_batch`)
