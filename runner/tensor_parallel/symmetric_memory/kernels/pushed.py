"""Collectives of the GPUs of one host as one Triton kernel, which pushes its numbers into the other GPUs' memory.

Each rank has an inbox, which the others can write. A word of an inbox has 32 bits of numbers and 32 bits that count the
collectives. A rank writes its words to the inboxes of all others, then waits until the words of this collective are in
its own: a word comes whole, so that no barrier and no second message is needed. All ranks add up in the order of the
ranks, in float32, and round once, so that their bits are equal.

An inbox has two halves, which collectives take in turn. A word may be written again when its reader has read it:
whoever writes the second next collective has received the next one, and its sender had finished this one before. So
collectives of all kinds share an inbox, as long as all ranks make the same ones in the same order.

Source: the LL protocol of NCCL ("Demystifying NCCL", arXiv:2507.04786), with counts in place of its flags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

BLOCK = 512
"""The words of a program, of 4 bytes of numbers each: four for each thread, a row of all threads apart."""

NUM_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Inboxes:
    """The inboxes of all ranks, as one of them sees them."""

    addresses: torch.Tensor  # [ranks] int64, of inboxes `[2, ranks, capacity]` int64, 0 at first
    counts: torch.Tensor  # [capacity / BLOCK] int32, the collectives of each program so far, 0 at first; changed
    stop: torch.Tensor  # [1] int32 that the host writes: once it is not 0, kernels wait no more, results are worthless
    capacity: int  # in words of 4 bytes from each rank
    rank: int


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
        word = (part.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32)
        send(tl.load(inboxes + to) + ((half + RANK) * CAPACITY + at).to(tl.int64) * 8, word, is_inside)
    expected = tl.full([BLOCK], 0, tl.int32) + count
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            part = own
        else:
            addresses = own_inbox + ((half + rank) * CAPACITY + at).to(tl.int64) * 8
            part = receive(addresses, expected, stop_address, is_inside)
        if not IS_SUMMED:
            tl.store(output.to(words) + rank * num_words + at, part, mask=is_inside)
        elif x.dtype.element_ty == tl.float32:
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
    if IS_SUMMED:
        if x.dtype.element_ty == tl.float32:
            summed = total.to(tl.int32, bitcast=True)
        else:
            lower = low_total.to(x.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
            upper = high_total.to(x.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
            summed = (lower & 0xFFFF) | (upper << 16)
        tl.store(output.to(words) + at, summed, mask=is_inside)
    tl.debug_barrier()  # every thread has read the count
    tl.store(counts + program, count)


_pushed = OverlappedKernel(pushed_kernel)
