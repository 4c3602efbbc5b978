"""The derivation of a step's inputs from the requests' states on the device, so that no token passes through the host.

The function follows Model Runner V2's `prepare_inputs`. The GPU runs one kernel, the CPU its torch reference.
"""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import PreparedRows


def prepare_inputs(
    states: PreparedRows, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, block_size: int
) -> None:
    """Fill the first `num_tokens` rows and `num_reqs` requests of `buffers`; both counts include padding.

    Reads `idx_mapping` and `query_start_loc`. Mutates `input_ids`, `positions` and `slot_mapping` (padded rows get
    0, 0 and PAD_SLOT_ID), `seq_lens` and `logits_indices` (padded requests get 0), and in `block_table` the blocks
    that each request uses; its other cells are unchanged. Each group of layers has a slot mapping and a block table.
    `block_size` is the kernels' block size, that of a page of `RequestStates`.

    A request without a state row (-1) is a dummy: its token ids are 0, its positions start at 0, and its keys and
    values are cached nowhere. Padded requests are dummies without tokens; a dummy batch has dummies with tokens.
    """
    if buffers.input_ids.device.type == "cuda":
        from piecegraph.runner.step.kernels.prepare_inputs import prepare_inputs_on_gpu

        prepare_inputs_on_gpu(states, buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=block_size)
        return
    prepare_inputs_reference(states, buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=block_size)


def prepare_inputs_reference(
    states: PreparedRows, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, block_size: int
) -> None:
    """Fill `buffers` like `prepare_inputs`, as the torch reference of the kernel."""
    starts = buffers.query_start_loc[: num_reqs + 1].tolist()
    for request, row in enumerate(buffers.idx_mapping[:num_reqs].tolist()):
        start, end = starts[request], starts[request + 1]
        buffers.logits_indices[request] = end - 1 if end > start else 0
        if row < 0:
            buffers.positions[start:end] = torch.arange(end - start, device=buffers.positions.device)
            buffers.input_ids[start:end] = 0
            buffers.slot_mapping[:, start:end] = PAD_SLOT_ID
            buffers.block_table[:, request, : -(-(end - start) // block_size)] = 0
            buffers.seq_lens[request] = end - start
            continue
        computed = int(states.num_computed_tokens[row])
        seq_len = computed + end - start
        positions = torch.arange(computed, seq_len, device=buffers.positions.device)
        buffers.positions[start:end] = positions
        buffers.input_ids[start:end] = states.token_ids[row, computed:seq_len]
        blocks = states.block_table[:, row, positions // block_size].to(torch.int64)
        buffers.slot_mapping[:, start:end] = blocks * block_size + positions % block_size
        num_blocks = -(-seq_len // block_size)
        buffers.block_table[:, request, :num_blocks] = states.block_table[:, row, :num_blocks]
        buffers.seq_lens[request] = seq_len
    padding = slice(starts[num_reqs], num_tokens)
    buffers.input_ids[padding] = 0
    buffers.positions[padding] = 0
    buffers.slot_mapping[:, padding] = PAD_SLOT_ID
