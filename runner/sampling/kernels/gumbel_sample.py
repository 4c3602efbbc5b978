# mypy: disallow-untyped-decorators=False
"""The two Triton kernels of `gumbel_sample`: the best of each block of a row's logits, then of the blocks.

The second one also records the drawn tokens in the requests' states, which saves a kernel at the end of each step. In
a graph both are launched while the preceding kernel still runs (`overlapped.py`), and wait for it first of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.common.token_record import TokenRecord

BLOCK = 2048
"""Logits a program reads at a time: 4 KiB of bfloat16."""

PROGRAMS = 528
"""The approximate number of programs, four on each multiprocessor of an H200, unless the rows have fewer blocks.

The grid is (rows, programs of a row), from shapes alone, so a graph can hold it; programs of padding return soon. A
vocabulary of 151,936 is 75 blocks: one row is read by 75 programs at once, each of 128 rows by four that load the next
block early, and the second kernel finishes a row in a single load. Greedy rows do two comparisons a logit and are bound
by memory, while a draw takes a Philox call for each four logits and two logarithms a logit and is bound by arithmetic.
"""


def gumbel_sample_on_gpu(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    record: TokenRecord | None = None,
    *,
    block: int = BLOCK,
    programs: int = PROGRAMS,
) -> None:
    """Draw as `runner.sampling.gumbel_sample` does. Writes `out`."""
    num_reqs, vocab_size = logits.shape
    if num_reqs == 0:
        return
    assert logits.stride(1) == 1, f"logits have strides {logits.stride()}; a row must be contiguous"
    all_blocks = triton.cdiv(vocab_size, block)
    num_blocks = triton.cdiv(all_blocks, max(1, programs // num_reqs))  # of a program
    num_programs = triton.cdiv(all_blocks, num_blocks)
    best = torch.empty(num_reqs, num_programs, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_reqs, num_programs, dtype=torch.int32, device=logits.device)
    _best_of_blocks.launch(
        (num_reqs, num_programs, 1),
        (best, tokens, logits, logits.stride(0), idx_mapping, temperature, seeds, positions, vocab_size, num_blocks),
        {"BLOCK": block},
        num_warps=4,
    )
    _best_of_rows.launch(
        (num_reqs, 1, 1),
        (
            *(out, best, tokens, idx_mapping, num_programs, positions),
            *((None, None, None, 0, 0) if record is None else (*record, *_stride_and_len(record.token_ids))),
        ),
        {"PADDED": triton.next_power_of_2(all_blocks)},
        num_warps=1,
    )


def _stride_and_len(token_ids: torch.Tensor) -> tuple[int, int]:
    assert token_ids.stride(1) == 1, f"tokens have strides {token_ids.stride()}; a row must be contiguous"
    return token_ids.stride(0), token_ids.shape[1]


@own_kernel
@triton.jit(do_not_specialize=["num_blocks"])
def best_of_blocks_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    best,  # [num_reqs, programs] float32, written
    tokens,  # [num_reqs, programs] int32, written
    logits,  # [num_reqs, vocab_size] any float
    logits_stride,
    idx_mapping,  # [num_reqs] int32
    temperatures,  # [rows] float32
    seeds,  # [rows] int64
    positions,  # [num_reqs] int32
    vocab_size,
    num_blocks,  # of a program
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the best token of each program's blocks. Grid: (num_reqs, programs of a row)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    block = tl.program_id(1) * num_blocks
    end = tl.minimum((block + num_blocks) * BLOCK, vocab_size)
    scores = logits + request * logits_stride
    token = block * BLOCK + offsets
    ahead = tl.load(scores + token, mask=token < end, other=float("-inf"))
    row = tl.load(idx_mapping + request).to(tl.int64)
    if row >= 0:
        temperature = tl.load(temperatures + row)
        best_score = tl.full([BLOCK], float("-inf"), tl.float32)
        best_token = token  # where all are -inf, the first of them
        for number in range(num_blocks):
            score = ahead.to(tl.float32)
            next_token = token + BLOCK
            ahead = tl.load(scores + next_token, mask=next_token < end, other=float("-inf"))
            score = tl.where(score == score, score, float("-inf"))  # NaN would not compare
            if temperature > 0:
                words = tl.randint4x(tl.load(seeds + row), tl.load(positions + request))
                high = words[0].to(tl.uint32, bitcast=True).to(tl.uint64)
                low = words[1].to(tl.uint32, bitcast=True).to(tl.uint64)
                four = (block + number) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
                u0, u1, u2, u3 = tl.rand4x((high << 32) | low, four)
                uniform = tl.interleave(tl.interleave(u0, u2), tl.interleave(u1, u3))  # u0 u1 u2 u3 u0 ...
                noise = -tl.log(-tl.log(uniform + 1e-20) + 1e-20)
                score = tl.div_rn(score, temperature) + noise
            best_token = tl.where(score > best_score, token, best_token)
            best_score = tl.maximum(score, best_score)
            token = next_token
        highest = tl.max(best_score, 0)
        first = tl.min(tl.where(best_score == highest, best_token, vocab_size), 0)
        at = request * tl.num_programs(1) + tl.program_id(1)
        tl.store(best + at, highest)
        tl.store(tokens + at, first)


@own_kernel
@triton.jit(do_not_specialize=["num_programs", "token_ids_stride", "max_model_len"])
def best_of_rows_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    out,  # [num_reqs] int64, written
    best,  # [num_reqs, num_programs] float32
    tokens,  # [num_reqs, num_programs] int32
    idx_mapping,  # [num_reqs] int32
    num_programs,
    positions,  # [num_reqs] int32
    token_ids,  # [rows, max_model_len] int32, written; None: nothing is recorded
    prefill_lens,  # [rows] int32
    num_computed_tokens,  # [rows] int32, written
    token_ids_stride,
    max_model_len,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the best token of each row and record it. Grid: (num_reqs,)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping + request).to(tl.int64)
    if row < 0:
        tl.store(out + request, 0)
    else:
        program = tl.arange(0, PADDED)
        is_program = program < num_programs
        score = tl.load(best + request * num_programs + program, mask=is_program, other=float("-inf"))
        highest = tl.max(score, 0)
        first = tl.min(tl.where((score == highest) & is_program, program, PADDED - 1), 0)
        token = tl.load(tokens + request * num_programs + first)
        tl.store(out + request, token.to(tl.int64))
        if token_ids is not None:
            position = tl.load(positions + request)
            is_drawn = (position >= tl.load(prefill_lens + row)) & (position < max_model_len)
            tl.store(token_ids + row * token_ids_stride + position, token, mask=is_drawn)
            tl.store(num_computed_tokens + row, position)


_best_of_blocks = OverlappedKernel(best_of_blocks_kernel)
_best_of_rows = OverlappedKernel(best_of_rows_kernel)
