"""The functions of `long_requests.py`, as kernels. Imports Triton: only where its interpreter was chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.runner.attention.triton.kernels.long_requests import longest, part_number, parts_before


@triton.jit  # type: ignore[untyped-decorator]
def numbered(seq_lens, out, num_reqs, window, max_parts, min_len, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    number = tl.program_id(0)
    request, part, before = part_number(number, num_reqs, seq_lens, window, max_parts, min_len, BLOCK_N, HAS_WINDOW)
    tl.store(out + number * 3, request)
    tl.store(out + number * 3 + 1, part)
    tl.store(out + number * 3 + 2, before)


@triton.jit  # type: ignore[untyped-decorator]
def counted(seq_lens, out, window, max_parts, min_len, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    request = tl.program_id(0)
    tl.store(out + request, parts_before(request, seq_lens, window, max_parts, min_len, BLOCK_N, HAS_WINDOW))


@triton.jit
def looked_at(seq_lens, out, num_reqs):  # type: ignore[no-untyped-def]
    tl.store(out, longest(num_reqs, seq_lens))
