# mypy: disallow-untyped-decorators=False
"""`gumbel_sample` as two Triton kernels: the best of each block of a row's logits, then of the blocks.

In a graph they are launched while what is ahead of them still runs (`overlapped.py`), and wait for it first of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.overlapped import OverlappedKernel
from piecegraph.passes.kernels.own_kernel import own_kernel

BLOCK = 4096
"""Logits a program reads: 8 KiB of bfloat16.

The grid is (rows, blocks of the vocabulary), from shapes alone, so a graph can hold it; rows that turn out
to be padding return at once. A vocabulary of 151,936 makes 38 blocks: one row is read by 38 programs at
once, and the second kernel finishes it in a single load. At 256 rows they are 9,728 programs, several
waves on any GPU; greedy rows do two comparisons a logit, so these wait for memory, while drawing costs a
Philox call for each four logits and two logarithms a logit, and waits for arithmetic. Smaller blocks would
spread one row further and give the second kernel more to read.
"""


def gumbel_sample_on_gpu(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """See `runner.sampling.gumbel_sample`."""
    num_reqs, vocab_size = logits.shape
    if num_reqs == 0:
        return
    assert logits.stride(1) == 1, f"logits have strides {logits.stride()}; a row must be contiguous"
    num_blocks = triton.cdiv(vocab_size, block)
    best = torch.empty(num_reqs, num_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_reqs, num_blocks, dtype=torch.int32, device=logits.device)
    _best_of_blocks.launch(
        (num_reqs, num_blocks, 1),
        (best, tokens, logits, logits.stride(0), idx_mapping, temperature, seeds, positions, vocab_size),
        {"NUM_BLOCKS": num_blocks, "BLOCK": block},
        num_warps=8 if block >= 4096 else 4,
    )
    _best_of_rows.launch(
        (num_reqs, 1, 1),
        (out, best, tokens, idx_mapping),
        {"NUM_BLOCKS": num_blocks, "PADDED": triton.next_power_of_2(num_blocks)},
        num_warps=1,
    )


@own_kernel
@triton.jit
def best_of_blocks_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    best,  # [num_reqs, NUM_BLOCKS] float32, written
    tokens,  # [num_reqs, NUM_BLOCKS] int32, written
    logits,  # [num_reqs, vocab_size] any float
    logits_stride,
    idx_mapping,  # [num_reqs] int32
    temperatures,  # [rows] float32
    seeds,  # [rows] int64
    positions,  # [num_reqs] int32
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping + request).to(tl.int64)
    if row >= 0:
        offsets = tl.arange(0, BLOCK)
        token = tl.program_id(1) * BLOCK + offsets
        is_token = token < vocab_size
        score = tl.load(logits + request * logits_stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
        score = tl.where(score == score, score, float("-inf"))  # NaN would not compare
        temperature = tl.load(temperatures + row)
        highest = tl.max(score, 0)
        if (temperature > 0) & (highest > float("-inf")):  # a block where nothing may be drawn needs no noise
            words = tl.randint4x(tl.load(seeds + row), tl.load(positions + request))
            high = words[0].to(tl.uint32, bitcast=True).to(tl.uint64)
            low = words[1].to(tl.uint32, bitcast=True).to(tl.uint64)
            four = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            u0, u1, u2, u3 = tl.rand4x((high << 32) | low, four)
            uniform = tl.interleave(tl.interleave(u0, u2), tl.interleave(u1, u3))  # u0 u1 u2 u3 u0 ...
            noise = -tl.log(-tl.log(uniform + 1e-20) + 1e-20)
            score = tl.div_rn(score, temperature) + noise
            highest = tl.max(score, 0)
        # The first of equal ones; where all are -inf that is the block's first.
        first = tl.min(tl.where(score == highest, offsets, BLOCK - 1), 0)
        at = request * NUM_BLOCKS + tl.program_id(1)
        tl.store(best + at, highest)
        tl.store(tokens + at, tl.program_id(1) * BLOCK + first)


@own_kernel
@triton.jit
def best_of_rows_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    out,  # [num_reqs] int64, written
    best,  # [num_reqs, NUM_BLOCKS] float32
    tokens,  # [num_reqs, NUM_BLOCKS] int32
    idx_mapping,  # [num_reqs] int32
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    if tl.load(idx_mapping + request) < 0:
        tl.store(out + request, 0)
    else:
        block = tl.arange(0, PADDED)
        score = tl.load(best + request * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf"))
        highest = tl.max(score, 0)
        first = tl.min(tl.where((score == highest) & (block < NUM_BLOCKS), block, PADDED - 1), 0)
        tl.store(out + request, tl.load(tokens + request * NUM_BLOCKS + first).to(tl.int64))


_best_of_blocks = OverlappedKernel(best_of_blocks_kernel)
_best_of_rows = OverlappedKernel(best_of_rows_kernel)
