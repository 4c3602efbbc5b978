"""A batch without requests, for attention backends."""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch


def padding_only(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """Return the metadata of a batch without requests, all of whose rows are padding."""
    slot_mapping = torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64)
    no_blocks = torch.zeros((0, 1), dtype=torch.int64)
    return AttentionMetadata(
        num_reqs=0,
        num_tokens=num_tokens,
        max_query_len=1,
        num_decode_reqs=0,
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=device),
        block_table=no_blocks.to(device, torch.int32),
        slot_mapping=slot_mapping.to(device),
        host=HostBatch(query_start_loc=(0,), seq_lens=(), block_table=no_blocks, slot_mapping=slot_mapping),
    )
