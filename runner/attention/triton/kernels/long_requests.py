"""The split of long requests in a batch that fills the GPU: by a few extra programs that long requests share.

Every request has a program for each block of heads. A launch has a few extra programs, which are assigned to the parts
of long requests in order of the requests; each program computes which part it has from all lengths of the batch. So a
batch without a long request costs a handful of programs that find no part, where a grid with that many splits for each
request costs a multiple of the requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel

LENGTHS = tl.constexpr(256)
"""Lengths that a program loads at a time."""


@own_kernel
@triton.jit
def num_parts(  # type: ignore[no-untyped-def]  # compiled by Triton
    seq_len, window, max_parts, min_len, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, few=1
):
    """Return how many programs should share the cached keys of requests of these lengths: int32, 1 or more.

    Each part gets at least a tile of `BLOCK_N` and, except for the first `few` parts, `min_len` keys up to rounding.
    """
    num_tiles = tl.cdiv(seq_len - 1, BLOCK_N)
    if HAS_WINDOW:
        num_tiles -= tl.maximum(seq_len - window, 0) // BLOCK_N
    wanted = tl.minimum(tl.maximum(tl.cdiv(num_tiles * BLOCK_N, min_len), few), max_parts)
    return tl.maximum(tl.minimum(wanted, num_tiles), 1)


@own_kernel
@triton.jit
def longest(num_reqs, seq_lens):  # type: ignore[no-untyped-def]  # compiled by Triton
    """Return the tokens of the longest request: int32. Faster to compute than a part's number."""
    found = 0
    for first in range(0, num_reqs, LENGTHS):
        rows = first + tl.arange(0, LENGTHS)
        found = tl.maximum(found, tl.max(tl.load(seq_lens + rows, mask=rows < num_reqs, other=0)))
    return found


@own_kernel
@triton.jit
def parts_before(  # type: ignore[no-untyped-def]  # compiled by Triton
    request, seq_lens, window, max_parts, min_len, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return how many parts beyond the first the requests before `request` have together: int32."""
    before = 0
    for first in range(0, request, LENGTHS):
        rows = first + tl.arange(0, LENGTHS)
        seq_len = tl.load(seq_lens + rows, mask=rows < request, other=0)
        before += tl.sum(num_parts(seq_len, window, max_parts, min_len, BLOCK_N, HAS_WINDOW) - 1)
    return before


@own_kernel
@triton.jit
def part_number(  # type: ignore[no-untyped-def]  # compiled by Triton
    number, num_reqs, seq_lens, window, max_parts, min_len, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Find part `number` among all parts beyond the requests' first ones.

    Returns its request, which part of that request it is (1 or more), and `parts_before` the request. Where there are
    fewer parts, the returned request is `num_reqs`.
    """
    request = 0
    before = 0
    counted = 0
    for first in range(0, num_reqs, LENGTHS):
        rows = first + tl.arange(0, LENGTHS)
        is_request = rows < num_reqs
        seq_len = tl.load(seq_lens + rows, mask=is_request, other=0)
        more = num_parts(seq_len, window, max_parts, min_len, BLOCK_N, HAS_WINDOW) - 1
        up_to = counted + tl.cumsum(more, 0)
        is_ahead = is_request & (up_to <= number)
        request += tl.sum(is_ahead.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(is_ahead, up_to, 0)))
        counted += tl.sum(more)
    return request, number - before + 1, before
