"""A batch of nobody's tokens: it runs every kernel a real one of its size would, and caches nothing."""

from __future__ import annotations

from itertools import accumulate

import torch

from piecegraph.runner.attention.metadata import PAD_SLOT_ID, HostBatch
from piecegraph.runner.attention.step_metadata import StepMetadata
from piecegraph.runner.input_buffers import InputBuffers


def dummy_batch(
    buffers: InputBuffers, *, num_tokens: int, max_model_len: int, with_host_batch: bool = False
) -> StepMetadata:
    """A batch of `num_tokens` tokens of new requests without state rows, as few as can hold them; rows that
    all requests together cannot fill are padding. `prepare_inputs` has to run before attention does: it
    sends their keys and values nowhere. For warm-up and capture."""
    lens = [max_model_len] * (num_tokens // max_model_len)
    lens += [num_tokens % max_model_len] if num_tokens % max_model_len else []
    lens = lens[: buffers.max_num_reqs]
    num_reqs = len(lens)
    buffers.fill([-1] * num_reqs, lens)
    hosts = None
    if with_host_batch:
        host = HostBatch(
            query_start_loc=(0, *accumulate(lens)),
            seq_lens=tuple(lens),
            block_table=torch.zeros((num_reqs, buffers.block_table.shape[2]), dtype=torch.int64),
            slot_mapping=torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64),
        )
        hosts = [host] * buffers.num_groups
    is_decode = lens == [1]
    return buffers.metadata(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=max(lens),
        num_decode_reqs=1 if is_decode else 0,
        hosts=hosts,
    )
