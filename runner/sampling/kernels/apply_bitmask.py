# mypy: disallow-untyped-decorators=False
"""The Triton kernel that masks logits by one bitmask a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 4096
"""Tokens that a program reads."""


def apply_bitmask_on_gpu(
    logits: torch.Tensor, selected: torch.Tensor, idx_mapping: torch.Tensor, bitmask: torch.Tensor
) -> None:
    """Mask `logits` as `allowed_token_ids.apply_bitmask_reference` does; only masked tokens are written."""
    vocab_size = logits.shape[1]
    _apply_bitmask[(selected.shape[0], triton.cdiv(vocab_size, BLOCK))](
        logits,
        logits.stride(0),
        selected,
        idx_mapping,
        bitmask,
        bitmask.stride(0),
        vocab_size,
        BLOCK=BLOCK,
    )


@own_kernel
@triton.jit
def _apply_bitmask(  # type: ignore[no-untyped-def]  # compiled by Triton
    logits,  # [num_reqs, vocab_size] float32, written
    logits_stride,
    selected,  # [num_selected] int32
    idx_mapping,  # [num_reqs] int32
    bitmask,  # [rows, bitmask_stride] int32
    bitmask_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    at = tl.load(selected + tl.program_id(0)).to(tl.int64)
    row = tl.load(idx_mapping + at).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    word = tl.load(bitmask + row * bitmask_stride + token // 32, mask=is_token, other=-1)
    is_out = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + at * logits_stride + token, float("-inf"), mask=is_token & is_out)
