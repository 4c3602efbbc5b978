"""The derivation of a step's inputs on a CPU by a kernel in C++."""

from __future__ import annotations

from pathlib import Path

from piecegraph.passes.kernels.common.cpp_kernel import NUMBER, POINTER, CppKernel
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import PreparedRows

KERNEL = CppKernel(
    Path(__file__).with_name("cpu_prepare_inputs.cpp"),
    "piecegraph_prepare_inputs",
    [
        *[POINTER] * 3, NUMBER, POINTER, POINTER, NUMBER, NUMBER, *[POINTER] * 3, NUMBER, POINTER, POINTER, NUMBER,
        NUMBER, POINTER, *[NUMBER] * 6,
    ],
)  # fmt: skip


def prepare_inputs_on_cpu(
    states: PreparedRows, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, block_size: int
) -> bool:
    """Fill `buffers` as `runner.step.prepare_inputs.prepare_inputs` does, if the kernel is there; return whether it is.

    The tensors are those of `RequestStates` and `InputBuffers`, whose rows are contiguous.
    """
    if KERNEL.call is None:
        return False
    KERNEL.call(
        buffers.idx_mapping.data_ptr(),
        buffers.query_start_loc.data_ptr(),
        states.token_ids.data_ptr(),
        states.token_ids.stride(0),
        states.num_computed_tokens.data_ptr(),
        states.block_table.data_ptr(),
        states.block_table.stride(0),
        states.block_table.stride(1),
        buffers.input_ids.data_ptr(),
        buffers.positions.data_ptr(),
        buffers.slot_mapping.data_ptr(),
        buffers.slot_mapping.stride(0),
        buffers.seq_lens.data_ptr(),
        buffers.block_table.data_ptr(),
        buffers.block_table.stride(0),
        buffers.block_table.stride(1),
        buffers.logits_indices.data_ptr(),
        buffers.block_table.shape[0],
        min(buffers.block_table.shape[2], states.block_table.shape[2]),
        num_reqs,
        num_tokens,
        block_size,
        PAD_SLOT_ID,
    )
    return True
