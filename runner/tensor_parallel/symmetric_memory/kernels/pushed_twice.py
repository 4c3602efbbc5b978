"""A sum over more than two GPUs of one host in two steps: each rank adds up a part of it, and sends that to all others.

A rank sends `2 * (ranks - 1) / ranks` of its numbers, and `ranks - 1` times all of them where it sends them to all
others at once (`pushed.py`), which waits for the others once instead of twice. Which is faster depends on the size. The
sums are the same to the bit: the rank that adds up does so in the order of the ranks, in float32, and rounds once.

Words, and when one may be written again, are those of `pushed.py`. A program covers a block for each rank, and in no
place of an inbox both steps write. Inboxes are no other collectives', because those count by other programs.

Source: the two-shot all-reduce of FlashInfer and TensorRT-LLM, with words that count in place of its barriers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import (
    BLOCK,
    NUM_WARPS,
    Inboxes,
    counted,
    packed,
    receive,
    send,
    sum_of_ranks,
)


def push_twice_and_add_up(x: torch.Tensor, output: torch.Tensor, inboxes: Inboxes) -> None:
    """Do what `push_and_add_up` does, with `inboxes` of its own."""
    num_words, num_ranks = x.nbytes // 4, inboxes.addresses.numel()
    _pushed_twice.launch(
        (triton.cdiv(num_words, num_ranks * BLOCK), 1, 1),
        (x, output, inboxes.addresses, inboxes.counts, inboxes.stop, num_words, 0),
        {"CAPACITY": inboxes.capacity, "RANK": inboxes.rank, "RANKS": num_ranks, "BLOCK": BLOCK},
        num_warps=NUM_WARPS,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_words", "zero"])
def pushed_twice_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_words] words of 4 bytes, in its own dtype
    output,  # [num_words] words, written; may be x
    inboxes,  # [RANKS] addresses of [2, RANKS, CAPACITY] int64
    counts,  # [programs], changed
    stop,  # [1]
    num_words,
    zero,  # of which Triton knows nothing; else a thread's words would be neighbours, and those of a write far apart
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of RANKS * BLOCK words,); in each the rank adds up the words from RANK * BLOCK on."""
    program = tl.program_id(0)
    at = program * (RANKS * BLOCK) + tl.arange(0, BLOCK) + zero
    own_at = at + RANK * BLOCK
    is_own = own_at < num_words
    words = tl.pointer_type(tl.int32)
    if OVERLAP:
        gdc_launch_dependents()
    own_inbox = tl.load(inboxes + RANK)
    stop_address = tl.full([BLOCK], 0, tl.int64) + stop.to(tl.int64)
    if OVERLAP:
        gdc_wait()
    count = tl.load(counts + program) + 1
    half = (count & 1) * RANKS
    for step in tl.static_range(1, RANKS):
        to = (RANK + step) % RANKS
        to_at = at + to * BLOCK
        part = tl.load(x.to(words) + to_at, mask=to_at < num_words, other=0)
        place = ((half + RANK) * CAPACITY + to_at).to(tl.int64) * 8
        send(tl.load(inboxes + to) + place, counted(part, count), to_at < num_words)
    expected = tl.full([BLOCK], 0, tl.int32) + count
    part = tl.load(x.to(words) + own_at, mask=is_own, other=0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    low, high = sum_of_ranks(
        part, own_inbox, half, own_at, expected, stop_address, is_own, DTYPE, CAPACITY, RANK, RANKS
    )  # fmt: skip
    own = packed(low, high, DTYPE)
    for step in tl.static_range(1, RANKS):
        to = (RANK + step) % RANKS
        place = ((half + RANK) * CAPACITY + own_at).to(tl.int64) * 8
        send(tl.load(inboxes + to) + place, counted(own, count), is_own)
    tl.store(output.to(words) + own_at, own, mask=is_own)
    for step in tl.static_range(1, RANKS):
        rank = (RANK + RANKS - step) % RANKS
        rank_at = at + rank * BLOCK
        place = ((half + rank) * CAPACITY + rank_at).to(tl.int64) * 8
        part = receive(own_inbox + place, expected, stop_address, rank_at < num_words)
        tl.store(output.to(words) + rank_at, part, mask=rank_at < num_words)
    tl.debug_barrier()  # every thread has read the count
    tl.store(counts + program, count)


_pushed_twice = OverlappedKernel(pushed_twice_kernel)
