"""The host's description of a step's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np
import torch

from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, HostBatch
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest
from piecegraph.runner.step.state.request_states import RequestStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests of a step in order; request `i` computes its next `query_lens[i]` tokens."""

    request_ids: tuple[str, ...]
    query_lens: tuple[int, ...]
    num_decode_reqs: int  # the leading requests that have one token each
    num_active_loras: int = 0  # as in `BatchDescriptor`
    num_draft_tokens: int = 0  # of all requests; their tokens are verified, so each has a row of logits

    @property
    def num_reqs(self) -> int:
        """The number of requests."""
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that all requests compute."""
        return sum(self.query_lens)

    @property
    def num_logits(self) -> int:
        """The rows of logits that the step computes: one for each request, and one for each draft."""
        return len(self.request_ids) + self.num_draft_tokens

    @property
    def max_query_len(self) -> int:
        """The largest number of tokens that a request computes; 0: there are no requests."""
        return max(self.query_lens, default=0)


def build_batch(
    scheduled: Sequence[ScheduledRequest], num_draft_tokens: int = 0, *, num_active_loras: int = 0
) -> Batch:
    """Return the batch of the scheduled requests, in the given order, of whose tokens some are drafts."""
    assert scheduled, "a step must have requests"
    query_lens = tuple([item.num_tokens for item in scheduled])
    return Batch(
        request_ids=tuple([item.request_id for item in scheduled]),
        query_lens=query_lens,
        num_decode_reqs=_num_leading_ones(query_lens),
        num_active_loras=num_active_loras,
        num_draft_tokens=num_draft_tokens,
    )


def _num_leading_ones(query_lens: tuple[int, ...]) -> int:
    if query_lens.count(1) == len(query_lens):  # nearly always
        return len(query_lens)
    return sum(1 for _ in takewhile(lambda query_len: query_len == 1, query_lens))


def host_batch(
    scheduled: Sequence[ScheduledRequest],
    states: RequestStates,
    block_size: int,
    num_tokens: int,
    *,
    group: int = 0,
    reaches: frozenset[Reach] | None = None,
) -> HostBatch:
    """Return the batch as attention metadata on the host, for backends that plan there.

    The block table is that of a `group` of layers, which see as far back as `reaches` says. Rows up to `num_tokens` are
    padding. `block_size` is the kernels' block size, that of a page of `RequestStates`. It is computed in numpy, whose
    calls on few numbers take a quarter of torch's time.
    """
    blocks = [states.host_blocks(item.request_id, group) for item in scheduled]
    max_blocks = max(map(len, blocks), default=0)
    padded = [[*each, *[0] * (max_blocks - len(each))] for each in blocks]
    block_table = np.array(padded, dtype=np.int64).reshape(len(scheduled), max_blocks)
    query_start_loc = (0, *accumulate(item.num_tokens for item in scheduled))
    total, starts = query_start_loc[-1], np.array(query_start_loc)
    row = np.arange(len(scheduled)).repeat(np.diff(starts))  # of each token
    first = np.array([item.num_computed_tokens for item in scheduled], dtype=np.int64)
    positions = np.arange(total) + (first - starts[:-1])[row]
    slot_mapping = np.full(num_tokens, PAD_SLOT_ID, dtype=np.int64)
    slot_mapping[:total] = block_table[row, positions // block_size] * block_size + positions % block_size
    return HostBatch(
        query_start_loc=query_start_loc,
        seq_lens=tuple(item.num_computed_tokens + item.num_tokens for item in scheduled),
        block_table=torch.from_numpy(block_table),
        slot_mapping=torch.from_numpy(slot_mapping),
        reaches=reaches,
        rows=tuple([states.row(item.request_id) for item in scheduled]) if states.keeps_prefill_lens else (),
        prefill_lens=tuple([states.host_prefill_len(item.request_id) for item in scheduled])
        if states.keeps_prefill_lens
        else (),
    )
