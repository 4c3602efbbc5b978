"""A sum over the GPUs of one host, the residual add and the RMS norm behind it, as one kernel.

Behind a sum in a decode step come a few kilobytes of work, which as a kernel of its own takes about as long as its
launch. Words, inboxes and counts are shared with `pushed.py`. A program has a row, which begins at a multiple of
`BLOCK` words of an inbox and has as many blocks as it fills. The sum is added up and rounded as there, and what follows
is computed as by `passes/kernels/norm/rms_norm.py`, but for the order in which squares are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_SIZE
from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import (
    BLOCK,
    Inboxes,
    counted,
    packed,
    send,
    sum_of_ranks,
    unpacked,
)

DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of which a word holds two numbers."""

MAX_ROWS = 16
"""The most rows. A program of 4,096 numbers takes half of a multiprocessor's registers while it waits for another rank,
and one of 8,192 all of them (sm_90, two ranks), so many programs would keep the next kernel from its prefetches. All
have to run at once, since each waits for the program of its row on other ranks."""

MAX_WARPS = 16


def can_norm(size: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes rows of `size` numbers of `dtype`."""
    return dtype in DTYPES and 2 <= size <= MAX_NORM_SIZE and size % 2 == 0


def push_and_norm(
    x: torch.Tensor,  # [num_rows, size]
    residual: torch.Tensor,
    weight: torch.Tensor | None,  # [size]
    eps: float,
    offset: float,
    inboxes: Inboxes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm` of the sum of `x` over the ranks: the norm and its input, both new, shaped as `x`.

    All tensors are of one dtype, contiguous and aligned to 4 bytes; `can_norm` is true of them, and there are at most
    `MAX_ROWS` rows. All ranks call this with the same shape.
    """
    num_rows, size = x.shape
    result, total = torch.empty_like(x), torch.empty_like(x)
    columns = _num_columns(size)
    _pushed_norm.launch(
        (num_rows, 1, 1),
        (x, residual, weight, result, total, inboxes.addresses, inboxes.counts, inboxes.stop, eps, offset, 0),
        {
            "WORDS": size // 2,
            "COLUMNS": columns,
            "CAPACITY": inboxes.capacity,
            "RANK": inboxes.rank,
            "RANKS": inboxes.addresses.numel(),
            "BLOCK": BLOCK,
        },
        num_warps=_num_warps(columns),
    )
    return result, total


def _num_columns(size: int) -> int:
    """Return the words of a program: those of a row, padded to a power of two of 128 at least."""
    return max(1 << (size // 2 - 1).bit_length(), 128)


def _num_warps(columns: int) -> int:
    """Return the warps of a program, of which a thread has four words where these are few."""
    return min(columns // 128, MAX_WARPS)


@own_kernel
@triton.jit(do_not_specialize=["zero"])
def pushed_norm_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [rows, WORDS] words of two numbers, in its own dtype
    residual,  # [rows, WORDS] words
    weight,  # [WORDS] words, or None
    result,  # [rows, WORDS] words, written
    total,  # [rows, WORDS] words, written
    inboxes,  # [RANKS] addresses of [2, RANKS, CAPACITY] int64
    counts,  # [blocks], changed
    stop,  # [1]
    eps,
    offset,
    zero,  # of which Triton knows nothing, as in `pushed_kernel`
    WORDS: tl.constexpr,  # of a row
    COLUMNS: tl.constexpr,  # WORDS, padded
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (rows,)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    BLOCKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK  # of a row
    column = tl.arange(0, COLUMNS) + zero
    is_inside = column < WORDS
    words = tl.pointer_type(tl.int32)
    if OVERLAP:
        gdc_launch_dependents()
    own_inbox = tl.load(inboxes + RANK)
    stop_address = tl.full([COLUMNS], 0, tl.int64) + stop.to(tl.int64)
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    block = row * BLOCKS + column // BLOCK
    count = tl.load(counts + block, mask=is_inside, other=0) + 1
    half = (count & 1) * RANKS
    here = row.to(tl.int64) * WORDS + column
    own = tl.load(x.to(words) + here, mask=is_inside, other=0)
    place = row * (BLOCKS * BLOCK) + column
    for step in tl.static_range(1, RANKS):
        to = (RANK + step) % RANKS
        sent_to = tl.load(inboxes + to) + ((half + RANK) * CAPACITY + place).to(tl.int64) * 8
        send(sent_to, counted(own, count), is_inside)
    low_more, high_more = unpacked(tl.load(residual.to(words) + here, mask=is_inside, other=0), DTYPE)
    if weight is not None:
        low_factor, high_factor = unpacked(tl.load(weight.to(words) + column, mask=is_inside, other=0), DTYPE)
    low, high = sum_of_ranks(own, own_inbox, half, place, count, stop_address, is_inside, DTYPE, CAPACITY, RANK, RANKS)
    low, high = unpacked(packed(low, high, DTYPE), DTYPE)
    added = packed(low + low_more, high + high_more, DTYPE)
    tl.store(total.to(words) + here, added, mask=is_inside)
    low, high = unpacked(added, DTYPE)
    factor = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    low *= factor
    high *= factor
    if weight is not None:
        low *= low_factor + offset
        high *= high_factor + offset
    tl.store(result.to(words) + here, packed(low, high, DTYPE), mask=is_inside)
    tl.debug_barrier()  # every thread has read the counts
    tl.store(counts + block, count, mask=is_inside & (column % BLOCK == 0))


_pushed_norm = OverlappedKernel(pushed_norm_kernel)
