"""The derivation of a step's inputs from the requests' states on the device, so that no token passes through the host.

The function follows Model Runner V2's `prepare_inputs`. A GPU runs one kernel, a CPU
one in C++, and where that is not there the torch reference.
"""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.step.kernels.cpu_prepare_inputs import prepare_inputs_on_cpu
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
    if prepare_inputs_on_cpu(states, buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=block_size):
        return
    prepare_inputs_reference(states, buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=block_size)


def prepare_inputs_reference(
    states: PreparedRows, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, block_size: int
) -> None:
    """Fill `buffers` like `prepare_inputs`, as the torch reference of the kernels."""
    starts = buffers.query_start_loc[: num_reqs + 1].long()
    total, lens, rows = int(starts[num_reqs]), starts.diff(), buffers.idx_mapping[:num_reqs].long()
    is_real, rows = rows >= 0, rows.clamp(min=0)
    computed = states.num_computed_tokens[rows].long().where(is_real, 0)
    seq_lens = computed + lens
    buffers.logits_indices[:num_reqs] = (starts[1:] - 1).where(lens > 0, 0).to(buffers.logits_indices.dtype)
    buffers.seq_lens[:num_reqs] = seq_lens.to(buffers.seq_lens.dtype)

    request = torch.arange(num_reqs, device=lens.device).repeat_interleave(lens, output_size=total)  # of each token
    positions = torch.arange(total, device=lens.device) + (computed - starts[:-1])[request]
    row_is_real, row = is_real[request], rows[request]
    buffers.positions[:total] = positions
    buffers.input_ids[:total] = states.token_ids[row, positions.where(row_is_real, 0)].where(row_is_real, 0)
    blocks = states.block_table[:, row, (positions // block_size).where(row_is_real, 0)].to(torch.int64)
    buffers.slot_mapping[:, :total] = (blocks * block_size + positions % block_size).where(row_is_real, PAD_SLOT_ID)

    num_blocks = (seq_lens + block_size - 1) // block_size
    most = int(num_blocks.max()) if num_reqs else 0
    is_written = torch.arange(most, device=lens.device) < num_blocks.unsqueeze(1)
    table = buffers.block_table[:, :num_reqs, :most]
    table.copy_(states.block_table[:, rows, :most].where(is_real.unsqueeze(1), 0).where(is_written, table))
    padding = slice(total, num_tokens)
    buffers.input_ids[padding] = 0
    buffers.positions[padding] = 0
    buffers.slot_mapping[:, padding] = PAD_SLOT_ID
