# mypy: disallow-untyped-decorators=False
"""The Triton kernel of min_p, top_k and top_p, which needs no sort: one program a row finds the row's threshold.

The tokens that stay are a set {x >= threshold}, so the kernel bisects for the threshold over the order of float32
numbers, as integers. Two passes find the maximum and, at a few distances below it, how many tokens and
how much probability lie above; a few tokens are then copied to one place, and bisection continues over these.
Only flat distributions, whose nucleus is longer than the copy, are bisected in whole passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 4096
"""Logits a program reads at a time."""
MAX_CANDIDATES = 4096
"""The most tokens of a row that are copied."""


def truncate_on_gpu(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
    *,
    block: int = BLOCK,
    max_candidates: int = MAX_CANDIDATES,
) -> None:
    """Mask `logits` as `truncation.truncate_reference` does, up to the rounding of sums of probabilities."""
    num_selected, vocab_size = selected.shape[0], logits.shape[1]
    candidates = torch.empty(num_selected, max_candidates, dtype=torch.float32, device=logits.device)
    _truncate[(num_selected,)](
        logits,
        logits.stride(0),
        selected,
        idx_mapping,
        temperature,
        table,
        candidates,
        vocab_size,
        MAX_CANDIDATES=max_candidates,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )


@own_kernel
@triton.jit
def _scaled(source, at, size, temperature):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Load logits at `at`, divided as torch divides; -inf past the end and for NaN."""
    x = tl.load(source + at, mask=at < size, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    return tl.where(x == x, x, float("-inf"))


@own_kernel
@triton.jit
def _key(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return float32 numbers as int32 numbers of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 become one number
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@own_kernel
@triton.jit
def _above(source, size, temperature, top, least, by_count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weight and the number of the logits whose keys are `least` or more.

    The weight is the number itself if `by_count`, else the sum of exp(x - top). Sums are taken in an order
    that does not depend on `least`, so a smaller `least` never gives a smaller sum.
    """
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = _scaled(source, at, size, temperature)
        is_above = (_key(x).to(tl.int64) >= least) & (at < size)
        weight += tl.where(is_above, tl.where(by_count, 1.0, tl.exp(x - top)), 0.0)
        count += is_above.to(tl.int32)
    return tl.sum(weight), tl.sum(count)


@own_kernel
@triton.jit
def _truncate(  # type: ignore[no-untyped-def]  # compiled by Triton
    logits,  # [num_reqs, vocab_size] float32, written
    logits_stride,
    selected,  # [num_selected] int32
    idx_mapping,  # [num_reqs] int32
    temperatures,  # [rows] float32
    table,  # [rows, 3] int32; see Truncation
    candidates,  # [num_selected, MAX_CANDIDATES] float32, written
    vocab_size,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.load(selected + tl.program_id(0)).to(tl.int64)
    row = tl.load(idx_mapping + request).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(table + row * 3)
    top_p = tl.load(table + row * 3 + 1).to(tl.float32, bitcast=True)
    log_min_p = tl.load(table + row * 3 + 2).to(tl.float32, bitcast=True)
    out = logits + request * logits_stride
    offsets = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, vocab_size, BLOCK):
        largest = tl.maximum(largest, _scaled(out, first + offsets, vocab_size, temperature))
    top = tl.max(largest)
    if top > float("-inf"):  # else all are masked already
        least = top + log_min_p
        threshold = _key(least).to(tl.int64)
        ties_kept = 2147483647.0  # of the tokens at the threshold, in their order
        if (top_k > 0) | (top_p < 1.0):
            # How many tokens, and how much weight, min_p leaves, and how much of it lies close to the maximum.
            count_0 = tl.zeros([BLOCK], dtype=tl.int32)
            count_2 = tl.zeros([BLOCK], dtype=tl.int32)
            count_4 = tl.zeros([BLOCK], dtype=tl.int32)
            count_8 = tl.zeros([BLOCK], dtype=tl.int32)
            count_16 = tl.zeros([BLOCK], dtype=tl.int32)
            weight_0 = tl.zeros([BLOCK], dtype=tl.float32)
            weight_2 = tl.zeros([BLOCK], dtype=tl.float32)
            weight_4 = tl.zeros([BLOCK], dtype=tl.float32)
            weight_8 = tl.zeros([BLOCK], dtype=tl.float32)
            weight_16 = tl.zeros([BLOCK], dtype=tl.float32)
            for first in range(0, vocab_size, BLOCK):
                at = first + offsets
                x = _scaled(out, at, vocab_size, temperature)
                is_left = (x >= least) & (at < vocab_size)
                weight = tl.where(is_left, tl.exp(x - top), 0.0)
                count_0 += is_left.to(tl.int32)
                count_2 += (is_left & (x >= top - 2.0)).to(tl.int32)
                count_4 += (is_left & (x >= top - 4.0)).to(tl.int32)
                count_8 += (is_left & (x >= top - 8.0)).to(tl.int32)
                count_16 += (is_left & (x >= top - 16.0)).to(tl.int32)
                weight_0 += weight
                weight_2 += tl.where(x >= top - 2.0, weight, 0.0)
                weight_4 += tl.where(x >= top - 4.0, weight, 0.0)
                weight_8 += tl.where(x >= top - 8.0, weight, 0.0)
                weight_16 += tl.where(x >= top - 16.0, weight, 0.0)
            num_left = tl.sum(count_0)
            total = tl.sum(weight_0)
            by_count = (top_k > 0) & (top_k < num_left)  # else top_k changes nothing
            wanted = tl.where(by_count, top_k.to(tl.float32), top_p * total)
            if by_count | (top_p < 1.0):
                # The threshold is the largest key whose tokens and those above weigh `wanted` or more. It lies in
                # [low, high]; num_above tokens have keys from `low` on.
                low = _key(least).to(tl.int64)
                high = _key(top).to(tl.int64)
                num_above = num_left
                n = tl.sum(count_16)
                if tl.where(by_count, n.to(tl.float32), tl.sum(weight_16)) >= wanted:
                    low = tl.maximum(low, _key(top - 16.0).to(tl.int64))
                    num_above = n
                n = tl.sum(count_8)
                if tl.where(by_count, n.to(tl.float32), tl.sum(weight_8)) >= wanted:
                    low = tl.maximum(low, _key(top - 8.0).to(tl.int64))
                    num_above = n
                n = tl.sum(count_4)
                if tl.where(by_count, n.to(tl.float32), tl.sum(weight_4)) >= wanted:
                    low = tl.maximum(low, _key(top - 4.0).to(tl.int64))
                    num_above = n
                n = tl.sum(count_2)
                if tl.where(by_count, n.to(tl.float32), tl.sum(weight_2)) >= wanted:
                    low = tl.maximum(low, _key(top - 2.0).to(tl.int64))
                    num_above = n

                while (low < high) & (num_above > MAX_CANDIDATES):
                    middle = low + (high - low + 1) // 2
                    weight_above, n = _above(out, vocab_size, temperature, top, middle, by_count, BLOCK)
                    if weight_above >= wanted:
                        low = middle
                        num_above = n
                    else:
                        high = middle - 1

                source = out
                size = vocab_size
                divisor = temperature
                if num_above <= MAX_CANDIDATES:
                    source = candidates + tl.program_id(0).to(tl.int64) * MAX_CANDIDATES
                    num_copied = 0
                    for first in range(0, vocab_size, BLOCK):
                        at = first + offsets
                        x = _scaled(out, at, vocab_size, temperature)
                        is_above = (_key(x).to(tl.int64) >= low) & (at < vocab_size)
                        n = tl.sum(is_above.to(tl.int32))
                        if n > 0:
                            to = num_copied + tl.cumsum(is_above.to(tl.int32), 0) - 1
                            tl.store(source + to, x, mask=is_above & (to < MAX_CANDIDATES))
                            num_copied += n
                    tl.debug_barrier()  # other threads of the program read what was stored
                    size = tl.minimum(num_copied, MAX_CANDIDATES)
                    divisor = 1.0

                while low < high:
                    middle = low + (high - low + 1) // 2
                    weight_above, n = _above(source, size, divisor, top, middle, by_count, BLOCK)
                    if weight_above >= wanted:
                        low = middle
                    else:
                        high = middle - 1

                if top_p < 1.0:
                    if by_count:  # that was top_k's threshold; top_p's lies above, by what top_k left
                        total, n = _above(source, size, divisor, top, low, False, BLOCK)
                        wanted = top_p * total
                        high = _key(top).to(tl.int64)
                        while low < high:
                            middle = low + (high - low + 1) // 2
                            weight_above, n = _above(source, size, divisor, top, middle, False, BLOCK)
                            if weight_above >= wanted:
                                low = middle
                            else:
                                high = middle - 1
                    # Tokens at the threshold stay while what came before them weighs less than wanted.
                    weight_above, num_above = _above(source, size, divisor, top, low + 1, False, BLOCK)
                    _, num_from = _above(source, size, divisor, top, low, False, BLOCK)
                    if num_from - num_above > 1:
                        bits = low.to(tl.int32)
                        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
                        each = tl.exp(bits.to(tl.float32, bitcast=True) - top)
                        ties_kept = (wanted - weight_above) / each
                threshold = low

        num_ties = 0
        for first in range(0, vocab_size, BLOCK):
            at = first + offsets
            x = _scaled(out, at, vocab_size, temperature)
            key = _key(x).to(tl.int64)
            is_kept = key > threshold
            is_tie = (key == threshold) & (at < vocab_size)
            n = tl.sum(is_tie.to(tl.int32))
            if n > 0:
                before = num_ties + tl.cumsum(is_tie.to(tl.int32), 0) - 1
                is_kept |= is_tie & (before.to(tl.float32) < ties_kept)
                num_ties += n
            is_kept &= x > float("-inf")  # a NaN is masked, whatever the threshold
            tl.store(out + at, float("-inf"), mask=(at < vocab_size) & (is_kept == 0))
