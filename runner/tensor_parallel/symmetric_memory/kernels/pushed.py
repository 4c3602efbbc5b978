"""Collectives of the GPUs of one host as one Triton kernel, which pushes its numbers into the other GPUs' memory.

Each rank has an inbox, which the others can write. A rank writes its words (`words.py`) to the inboxes of all others,
then waits until the words of this collective are in its own. All ranks add up in the order of the ranks, in float32,
and round once, so that their bits are equal.

An inbox has two halves, which collectives take in turn. A word may be written again when its reader has read it:
whoever writes the second next collective has received the next one, and its sender had finished this one before. So
collectives of all kinds share an inbox, as long as all ranks make the same ones in the same order.
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


def push_and_add_up(x: torch.Tensor, output: torch.Tensor, inboxes: Inboxes) -> None:
    """Write the sum of `x` over the ranks to `output`, which may be `x`; all ranks call this for the same size.

    Both are contiguous, float32, bfloat16 or float16, at most `capacity` words of 4 bytes, aligned to 4 bytes; so are
    the tensors of the other functions, of which `gather` takes any dtype.
    """
    _launch(x, output, inboxes, x.nbytes, is_summed=True, is_scattered=False)


def push_and_scatter_sum(x: torch.Tensor, output: torch.Tensor, inboxes: Inboxes) -> None:
    """Write this rank's part of the sum of `x` over the ranks, `[ranks, ...]`, to `output`, `[...]`.

    A part has at most `capacity` words. `output` is no part of `x`.
    """
    _launch(x, output, inboxes, output.nbytes, is_summed=True, is_scattered=True)


def push_and_gather(x: torch.Tensor, output: torch.Tensor, inboxes: Inboxes) -> None:
    """Write `x` of all ranks, in their order, to `output`, `[ranks, *x.shape]`."""
    words, gathered = (each.view(-1).view(torch.int32) for each in (x, output))
    _launch(words, gathered, inboxes, x.nbytes, is_summed=False, is_scattered=False)


def _launch(
    x: torch.Tensor, output: torch.Tensor, inboxes: Inboxes, num_bytes: int, *, is_summed: bool, is_scattered: bool
) -> None:
    num_words = num_bytes // 4
    _pushed.launch(
        (triton.cdiv(num_words, BLOCK), 1, 1),
        (x, output, inboxes.addresses, inboxes.counts, inboxes.stop, num_words, 0),
        {
            "CAPACITY": inboxes.capacity,
            "RANK": inboxes.rank,
            "RANKS": inboxes.addresses.numel(),
            "IS_SUMMED": is_summed,
            "IS_SCATTERED": is_scattered,
            "BLOCK": BLOCK,
        },
        num_warps=NUM_WARPS,
    )


@own_kernel
@triton.jit(do_not_specialize=["num_words", "zero"])
def pushed_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_words] words of 4 bytes, in its own dtype; scattered, [RANKS, num_words]
    output,  # [num_words] words, written; may be x; if it is no sum, [RANKS, num_words]
    inboxes,  # [RANKS] addresses of [2, RANKS, CAPACITY] int64
    counts,  # [programs], changed
    stop,  # [1]
    num_words,
    zero,  # of which Triton knows nothing; else a thread's words would be neighbours, and those of a write far apart
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of BLOCK words,)."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK) + zero
    is_inside = at < num_words
    words = tl.pointer_type(tl.int32)
    if OVERLAP:
        gdc_launch_dependents()
    own_inbox = tl.load(inboxes + RANK)
    stop_address = tl.full([BLOCK], 0, tl.int64) + stop.to(tl.int64)
    if OVERLAP:
        gdc_wait()
    count = tl.load(counts + program) + 1
    half = (count & 1) * RANKS
    numbers = x.to(words) + at
    if IS_SCATTERED:
        own = tl.load(numbers + RANK * num_words, mask=is_inside, other=0)
    else:
        own = tl.load(numbers, mask=is_inside, other=0)
    for step in tl.static_range(1, RANKS):
        to = (RANK + step) % RANKS
        part = own
        if IS_SCATTERED:
            part = tl.load(numbers + to * num_words, mask=is_inside, other=0)
        place = ((half + RANK) * CAPACITY + at).to(tl.int64) * 8
        send(tl.load(inboxes + to) + place, counted(part, count), is_inside)
    expected = tl.full([BLOCK], 0, tl.int32) + count
    if IS_SUMMED:
        DTYPE: tl.constexpr = x.dtype.element_ty
        low, high = sum_of_ranks(
            own, own_inbox, half, at, expected, stop_address, is_inside, DTYPE, CAPACITY, RANK, RANKS
        )  # fmt: skip
        tl.store(output.to(words) + at, packed(low, high, DTYPE), mask=is_inside)
    else:
        for rank in tl.static_range(RANKS):
            part = own
            if rank != RANK:
                addresses = own_inbox + ((half + rank) * CAPACITY + at).to(tl.int64) * 8
                part = receive(addresses, expected, stop_address, is_inside)
            tl.store(output.to(words) + rank * num_words + at, part, mask=is_inside)
    tl.debug_barrier()  # every thread has read the count
    tl.store(counts + program, count)


_pushed = OverlappedKernel(pushed_kernel)
