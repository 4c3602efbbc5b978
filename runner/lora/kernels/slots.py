"""The Triton kernel that derives the slots of a step's rows: one program per request, and one for the padded rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 1024
"""The number of slots that a program writes at a time."""


def slots_on_gpu(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    of_request: torch.Tensor,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    num_tokens: int,
    num_reqs: int,
) -> None:
    """Fill `tokens` and `logits`; see `slot_map.SlotMap.prepare`."""
    _slots[(num_reqs + 1,)](idx_mapping, query_start_loc, of_request, tokens, logits, num_reqs, num_tokens, BLOCK=BLOCK)


@own_kernel
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _slots(  # type: ignore[no-untyped-def]  # compiled by Triton
    idx_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    of_request,  # [rows] int32
    tokens,  # [num_tokens] int32, written
    logits,  # [num_reqs] int32, written
    num_reqs,
    num_tokens,
    BLOCK: tl.constexpr,
):
    """Grid: the requests, and one program for the rows behind them."""
    request = tl.program_id(0)
    is_padding = request == num_reqs
    start = tl.load(query_start_loc + request)
    end = num_tokens
    slot = tl.full([], -1, dtype=tl.int32)
    if not is_padding:
        end = tl.load(query_start_loc + request + 1)
        row = tl.load(idx_mapping + request).to(tl.int64)
        slot = tl.load(of_request + row, mask=row >= 0, other=-1)
        tl.store(logits + request, slot)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(tokens + at, tl.zeros([BLOCK], dtype=tl.int32) + slot, mask=at < end)
