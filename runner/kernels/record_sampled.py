"""`record_sampled` as one Triton kernel of one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.overlapped import OverlappedKernel
from piecegraph.passes.kernels.own_kernel import own_kernel
from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.request_states import RequestStates

BLOCK = 256
"""Requests handled at a time."""


def record_sampled_on_gpu(
    states: RequestStates, buffers: InputBuffers, sampled: torch.Tensor, *, num_reqs: int
) -> None:
    """See `runner.record_sampled`."""
    _record_sampled.launch(
        (triton.cdiv(num_reqs, BLOCK), 1, 1),
        (
            buffers.idx_mapping,
            buffers.seq_lens,
            sampled,
            states.prefill_lens,
            states.num_computed_tokens,
            states.token_ids,
            states.token_ids.stride(0),
            num_reqs,
        ),
        {"MAX_MODEL_LEN": states.token_ids.shape[1], "BLOCK": BLOCK},
        num_warps=4,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_reqs"])
def record_sampled_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    idx_mapping,  # [num_reqs] int32
    seq_lens,  # [num_reqs] int32
    sampled,  # [num_reqs] integers
    prefill_lens,  # [rows] int32
    num_computed_tokens,  # [rows] int32, written
    token_ids,  # [rows, MAX_MODEL_LEN] int32, written
    token_ids_stride,
    num_reqs,
    MAX_MODEL_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(idx_mapping + request, mask=request < num_reqs, other=-1).to(tl.int64)
    is_real = row >= 0
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)
    prefill_len = tl.load(prefill_lens + row, mask=is_real, other=0)
    token = tl.load(sampled + request, mask=is_real, other=0).to(tl.int32)
    is_sampled = is_real & (seq_len >= prefill_len) & (seq_len < MAX_MODEL_LEN)
    tl.store(token_ids + row * token_ids_stride + seq_len, token, mask=is_sampled)
    tl.store(num_computed_tokens + row, seq_len, mask=is_real)


_record_sampled = OverlappedKernel(record_sampled_kernel)
