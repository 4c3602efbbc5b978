"""How much memory a step takes at its largest, measured on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from piecegraph.runner.attention.backend import AttentionBackend
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.kv_cache import allocate_kv_caches


@torch.no_grad()
def peak_activation_bytes(
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    layers: Sequence[AttentionLayer],
    backend: AttentionBackend,
    num_tokens: int,
    num_logits: int,
    device: torch.device,
) -> int:
    """Peak of one forward pass of `num_tokens` tokens, all padding: nothing is attended to or cached."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    rows = torch.zeros(num_logits, dtype=torch.int64, device=device)
    context = ForwardContext(
        impl=backend.impl(),
        metadata=backend.metadata_builder(layers, 1, device, max_num_reqs=1).build(padding_only(num_tokens, device)),
        kv_caches=allocate_kv_caches(layers, 1, 1, device),
    )
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with set_forward_context(context):
        forward(tokens, tokens, rows)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def padding_only(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """A batch of no requests, all of whose rows are padding."""
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
