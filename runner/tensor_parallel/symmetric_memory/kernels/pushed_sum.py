"""A sum over the GPUs of one host as one Triton kernel, which pushes its numbers into the other GPUs' memory.

Each rank has an inbox, which the others can write. A word of an inbox has 32 bits of numbers and 32 bits that count the
sums. A rank writes its words to the inboxes of all others, then waits until the words of this sum are in its own: a
word comes whole, so that no barrier and no second message is needed. All ranks add up in the order of the ranks, in
float32, and round once, so that their bits are equal.

An inbox has two halves, which sums take in turn. A word may be written again when its reader has read it: whoever
writes the second next sum has received the next one, and its sender had finished this one before.

Source: the LL protocol of NCCL ("Demystifying NCCL", arXiv:2507.04786), with counts in place of its flags.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 512
"""The words of a program, of 4 bytes of numbers each: four for each thread, a row of all threads apart."""

NUM_WARPS = 4


def push_and_add_up(
    x: torch.Tensor,
    output: torch.Tensor,
    inboxes: torch.Tensor,
    counts: torch.Tensor,
    stop: torch.Tensor,
    capacity: int,
    rank: int,
) -> None:
    """Write the sum of `x` over the ranks to `output`, which may be `x`; all ranks call this for the same size.

    `x`, `output`: contiguous, float32, bfloat16 or float16, at most `capacity` words of 4 bytes, aligned to 4 bytes.
    `inboxes`: [ranks] int64, the addresses of the inboxes, each `[2, ranks, capacity]` int64, 0 at first.
    `counts`: [capacity / BLOCK] int32, what each program has added up so far, 0 at first; changed.
    `stop`: [1] int32 in memory that the host writes; once it is not 0, kernels wait no more and results are worthless.
    """
    num_words = x.nbytes // 4
    _pushed_sum.launch(
        (triton.cdiv(num_words, BLOCK), 1, 1),
        (x, output, inboxes, counts, stop, num_words, 0),
        {"CAPACITY": capacity, "RANK": rank, "RANKS": inboxes.numel(), "BLOCK": BLOCK},
        num_warps=NUM_WARPS,
    )


@own_kernel
@triton.jit
def send(addresses, words, is_inside):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Write words of 64 bits, each at once, to memory that another GPU reads."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred inside;
            setp.ne.u32 inside, $3, 0;
            @inside st.relaxed.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
        }""", "=r,l,l,r", [addresses, words, is_inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@own_kernel
@triton.jit
def receive(addresses, count, stop, is_inside):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Wait for words of 64 bits whose upper half is `count`, and return their lower halves.

    A thread asks for four words at once. After 1,024 times in vain it looks at `stop`, and ends if that is not 0.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .pred is_late, is_stopped;
            .reg .b32 f0, f1, f2, f3, polls, often, stopped;
            .reg .b64 w0, w1, w2, w3;
            mov.u32 polls, 0;
        poll:
            mov.b64 w0, {0, $8};
            mov.b64 w1, {0, $9};
            mov.b64 w2, {0, $10};
            mov.b64 w3, {0, $11};
            setp.ne.u32 is_late, $16, 0;
            @is_late ld.relaxed.sys.global.b64 w0, [$4];
            setp.ne.u32 is_late, $17, 0;
            @is_late ld.relaxed.sys.global.b64 w1, [$5];
            setp.ne.u32 is_late, $18, 0;
            @is_late ld.relaxed.sys.global.b64 w2, [$6];
            setp.ne.u32 is_late, $19, 0;
            @is_late ld.relaxed.sys.global.b64 w3, [$7];
            mov.b64 {$0, f0}, w0;
            mov.b64 {$1, f1}, w1;
            mov.b64 {$2, f2}, w2;
            mov.b64 {$3, f3}, w3;
            xor.b32 f0, f0, $8;
            xor.b32 f1, f1, $9;
            xor.b32 f2, f2, $10;
            xor.b32 f3, f3, $11;
            or.b32 f0, f0, f1;
            or.b32 f2, f2, f3;
            or.b32 f0, f0, f2;
            setp.eq.u32 is_late, f0, 0;
            @is_late bra received;
            add.u32 polls, polls, 1;
            and.b32 often, polls, 1023;
            setp.ne.u32 is_late, often, 0;
            @is_late bra poll;
            ld.relaxed.sys.global.u32 stopped, [$12];
            setp.eq.u32 is_stopped, stopped, 0;
            @is_stopped bra poll;
        received:
        }""", "=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r,l,l,l,l,r,r,r,r",
        [addresses, count, stop, is_inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@own_kernel
@triton.jit(do_not_specialize=["num_words", "zero"])
def pushed_sum_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_words] words of 4 bytes, in its own dtype
    output,  # as x, written; may be x
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
    own = tl.load(x.to(words) + at, mask=is_inside, other=0)
    half = (count & 1) * RANKS
    word = (own.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32)
    for step in tl.static_range(1, RANKS):
        inbox = tl.load(inboxes + (RANK + step) % RANKS)
        send(inbox + ((half + RANK) * CAPACITY + at).to(tl.int64) * 8, word, is_inside)
    expected = tl.full([BLOCK], 0, tl.int32) + count
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            part = own
        else:
            addresses = own_inbox + ((half + rank) * CAPACITY + at).to(tl.int64) * 8
            part = receive(addresses, expected, stop_address, is_inside)
        if x.dtype.element_ty == tl.float32:
            each = part.to(tl.float32, bitcast=True)
            if rank == 0:
                total = each
            else:
                total += each
        else:
            low = part.to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            high = (part >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            if rank == 0:
                low_total, high_total = low, high
            else:
                low_total += low
                high_total += high
    if x.dtype.element_ty == tl.float32:
        summed = total.to(tl.int32, bitcast=True)
    else:
        lower = low_total.to(x.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
        upper = high_total.to(x.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
        summed = (lower & 0xFFFF) | (upper << 16)
    tl.store(output.to(words) + at, summed, mask=is_inside)
    tl.debug_barrier()  # every thread has read the count
    tl.store(counts + program, count)


_pushed_sum = OverlappedKernel(pushed_sum_kernel)
