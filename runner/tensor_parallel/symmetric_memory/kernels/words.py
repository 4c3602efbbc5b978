"""Words of 64 bits that GPUs write into each other's memory, and the numbers in them.

A word of an inbox has 32 bits of numbers and 32 bits that count the collectives. It comes whole, so that whoever waits
for it needs no barrier and no second message.

Source: the LL protocol of NCCL ("Demystifying NCCL", arXiv:2507.04786), with counts in place of its flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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

    @classmethod
    def of(
        cls, addresses: Sequence[int], capacity: int, rank: int, stop: torch.Tensor, device: torch.device
    ) -> Inboxes:
        """Return the inboxes at `addresses`, one of each rank, in which no collective was yet."""
        return cls(
            addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
            counts=torch.zeros(capacity // BLOCK, dtype=torch.int32, device=device),
            stop=stop,
            capacity=capacity,
            rank=rank,
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
@triton.jit
def counted(numbers, count):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return words of 64 bits with `numbers`, 32 bits each, and a count."""
    return (numbers.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32)


@own_kernel
@triton.jit
def unpacked(numbers, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the lower and the upper number of 32 bits, in float32; of one number of 32 bits, it and nothing."""
    if tl.float32 == DTYPE:
        low = numbers.to(tl.float32, bitcast=True)
        high = 0.0
    else:
        low = numbers.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (numbers >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@own_kernel
@triton.jit
def packed(low, high, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return numbers as `unpacked` takes them, rounded to `DTYPE`."""
    if tl.float32 == DTYPE:
        numbers = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        upper = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        numbers = (lower & 0xFFFF) | (upper << 16)
    return numbers


@own_kernel
@triton.jit
def sum_of_ranks(  # type: ignore[no-untyped-def]  # compiled by Triton
    own,  # words of 32 bits of this rank
    inbox,  # the address of its inbox
    half,  # of the inbox, in parts of CAPACITY words
    place,  # of each word in a part
    count,  # of each word
    stop,  # as `receive` takes it
    is_inside,
    DTYPE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Wait for the words of all other ranks, and return the lower and the upper numbers of the sum, in float32.

    Ranks are added in their order, so that all have the same bits.
    """
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            part = own
        else:
            part = receive(inbox + ((half + rank) * CAPACITY + place).to(tl.int64) * 8, count, stop, is_inside)
        low, high = unpacked(part, DTYPE)
        if rank == 0:
            low_total, high_total = low, high
        else:
            low_total += low
            high_total += high
    return low_total, high_total
