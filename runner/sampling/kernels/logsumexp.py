# mypy: disallow-untyped-decorators=False
"""The Triton kernel of log(sum(exp(logits))) and a token's rank, in one pass, with one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 8192
"""Logits a program reads at a time."""


def logsumexp_and_ranks_on_gpu(
    logits: torch.Tensor, token_ids: torch.Tensor, logsumexp: torch.Tensor, ranks: torch.Tensor, *, block: int = BLOCK
) -> None:
    """Write what `logprobs.logsumexp_and_ranks_reference` writes."""
    if logits.shape[0] == 0:
        return
    _logsumexp_and_ranks[(logits.shape[0],)](
        logsumexp,
        ranks,
        logits,
        logits.stride(0),
        token_ids,
        logits.shape[1],
        BLOCK=block,
        num_warps=16 if block >= 8192 else 4,
    )


@own_kernel
@triton.jit
def _logsumexp_and_ranks(  # type: ignore[no-untyped-def]  # compiled by Triton
    logsumexp,  # [n] float32, written
    ranks,  # [n] int32, written
    logits,  # [n, vocab_size] any float
    logits_stride,
    token_ids,  # [n] int64
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * logits_stride
    logit = tl.load(source + tl.load(token_ids + row)).to(tl.float32)
    # Each lane keeps its own maximum and sum; they are combined at the end.
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, vocab_size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        is_any = higher > float("-inf")  # -inf - -inf is NaN
        total = tl.where(is_any, total * tl.exp(top - higher) + tl.exp(x - higher), 0.0)
        top = higher
        rank += ((x >= logit) & (at < vocab_size)).to(tl.int32)
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top > float("-inf"), total * tl.exp(top - highest), 0.0), 0)
    tl.store(logsumexp + row, highest + tl.log(total))
    tl.store(ranks + row, tl.sum(rank, 0))
