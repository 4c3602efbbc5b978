"""The Triton kernel of `prepare_inputs`: one program per request and group of layers, and one for the padded rows."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import PreparedRows

BLOCK = 1024
"""The number of tokens, or of block numbers, that a program copies at a time."""


def prepare_inputs_on_gpu(
    states: PreparedRows, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, block_size: int
) -> None:
    """Fill `buffers` on the GPU; see `runner.step.prepare_inputs.prepare_inputs`."""
    _prepare_inputs[(num_reqs + 1, buffers.block_table.shape[0])](
        buffers.idx_mapping,
        buffers.query_start_loc,
        states.token_ids,
        states.token_ids.stride(0),
        states.num_computed_tokens,
        states.block_table,
        states.block_table.stride(0),
        states.block_table.stride(1),
        buffers.input_ids,
        buffers.positions,
        buffers.slot_mapping,
        buffers.slot_mapping.stride(0),
        buffers.seq_lens,
        buffers.block_table,
        buffers.block_table.stride(0),
        buffers.block_table.stride(1),
        buffers.logits_indices,
        num_reqs,
        num_tokens,
        BLOCK_SIZE=block_size,
        PAD_SLOT=PAD_SLOT_ID,
        BLOCK=BLOCK,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _prepare_inputs(  # type: ignore[no-untyped-def]  # compiled by Triton
    idx_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    token_ids,  # [rows, max_model_len] int32
    token_ids_stride,
    num_computed_tokens,  # [rows] int32
    state_block_table,  # [num_groups, rows, max_blocks] int32
    state_block_table_group_stride,
    state_block_table_stride,
    input_ids,  # [num_tokens] int64, written
    positions,  # [num_tokens] int64, written
    slot_mapping,  # [num_groups, num_tokens] int64, written
    slot_mapping_group_stride,
    seq_lens,  # [num_reqs] int32, written
    block_table,  # [num_groups, num_reqs, max_blocks] int32, written where in use
    block_table_group_stride,
    block_table_stride,
    logits_indices,  # [num_reqs] int64, written
    num_reqs,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_reqs + 1, num_groups). What groups share is written by the programs of the first."""
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    is_first = group == 0
    slots = slot_mapping + group * slot_mapping_group_stride
    offsets = tl.arange(0, BLOCK)
    if request == num_reqs:  # the rows after all requests'
        num_shared = tl.where(is_first, num_tokens, 0)
        for first in range(tl.load(query_start_loc + num_reqs), num_tokens, BLOCK):
            at = first + offsets
            zeros = tl.zeros([BLOCK], dtype=tl.int64)
            tl.store(input_ids + at, zeros, mask=at < num_shared)
            tl.store(positions + at, zeros, mask=at < num_shared)
            tl.store(slots + at, zeros + PAD_SLOT, mask=at < num_tokens)
    else:
        row = tl.load(idx_mapping + request).to(tl.int64)
        is_real = row >= 0
        start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - start
        computed = tl.load(num_computed_tokens + row, mask=is_real, other=0)
        num_read = tl.where(is_real, query_len, 0)
        num_shared = tl.where(is_first, query_len, 0)
        blocks = state_block_table + group * state_block_table_group_stride + row * state_block_table_stride
        table = block_table + group * block_table_group_stride + request.to(tl.int64) * block_table_stride
        for first in range(0, query_len, BLOCK):
            at = first + offsets
            position = computed + at
            is_read = at < num_read
            is_token_read = at < tl.minimum(num_read, num_shared)
            token = tl.load(token_ids + row * token_ids_stride + position, mask=is_token_read, other=0)
            block = tl.load(blocks + position // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
            slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, PAD_SLOT)
            tl.store(input_ids + start + at, token.to(tl.int64), mask=at < num_shared)
            tl.store(positions + start + at, position.to(tl.int64), mask=at < num_shared)
            tl.store(slots + start + at, slot, mask=at < query_len)
        seq_len = computed + query_len
        num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
        num_blocks_read = tl.where(is_real, num_blocks, 0)
        for first in range(0, num_blocks, BLOCK):
            at = first + offsets
            block = tl.load(blocks + at, mask=at < num_blocks_read, other=0)
            tl.store(table + at, block, mask=at < num_blocks)
        if is_first:
            tl.store(seq_lens + request, seq_len)
            last = tl.where(query_len > 0, start + query_len - 1, 0)
            tl.store(logits_indices + request, last.to(tl.int64))
