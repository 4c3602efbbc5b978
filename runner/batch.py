"""This step's inputs: the scheduled requests' tokens, flattened into one row of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from piecegraph.runner.attention.metadata import AttentionMetadata, HostBatch
from piecegraph.runner.scheduler import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    logits_indices: torch.Tensor  # [num_logits] int64, rows that sample; never empty
    attention: AttentionMetadata


def build_batch(scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> Batch:
    """Flatten the next `num_tokens` uncomputed tokens of each request, in the order given.

    `logits_indices` has the last row of every request that samples. When none does it has row 0, whose
    logits nobody reads: an empty selection would be one more shape to compile for.
    """
    assert scheduled, "a step without requests"
    input_ids: list[int] = []
    positions: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    logits_indices: list[int] = []
    max_blocks = max(len(item.request.block_ids) for item in scheduled)
    block_table = torch.zeros((len(scheduled), max_blocks), dtype=torch.int64)
    for row, item in enumerate(scheduled):
        request, start = item.request, item.request.num_computed_tokens
        end = start + item.num_tokens
        input_ids += request.token_ids(start, end)
        positions += range(start, end)
        query_start_loc.append(query_start_loc[-1] + item.num_tokens)
        seq_lens.append(end)
        block_table[row, : len(request.block_ids)] = torch.tensor(request.block_ids)
        if item.is_sampled:
            logits_indices.append(query_start_loc[-1] - 1)

    def on_device(values: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

    positions_cpu = torch.tensor(positions)
    rows = torch.repeat_interleave(torch.arange(len(scheduled)), torch.tensor(query_start_loc).diff())
    slot_mapping = block_table[rows, positions_cpu // block_size] * block_size + positions_cpu % block_size
    return Batch(
        input_ids=on_device(input_ids, torch.int64),
        positions=on_device(positions_cpu, torch.int64),
        logits_indices=on_device(logits_indices or [0], torch.int64),
        attention=AttentionMetadata(
            num_reqs=len(scheduled),
            num_tokens=len(input_ids),
            max_query_len=max(item.num_tokens for item in scheduled),
            num_decode_reqs=sum(1 for _ in takewhile(lambda item: item.num_tokens == 1, scheduled)),
            query_start_loc=on_device(query_start_loc, torch.int32),
            seq_lens=on_device(seq_lens, torch.int32),
            block_table=on_device(block_table, torch.int32),
            slot_mapping=on_device(slot_mapping, torch.int64),
            host=HostBatch(
                query_start_loc=tuple(query_start_loc),
                seq_lens=tuple(seq_lens),
                block_table=block_table,
                slot_mapping=slot_mapping,
            ),
        ),
    )
