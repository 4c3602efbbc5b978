"""Triton's own numbers, to compare with those of `philox.py`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def draw(seed_ptr, uniform, words, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the first and last of four uniform numbers, and the first two of four words, for each of `n` offsets."""
    seed = tl.load(seed_ptr)
    offset = tl.arange(0, n)
    u, _, _, x = tl.rand4x(seed, offset)
    tl.store(uniform + offset, u)
    tl.store(uniform + n + offset, x)
    a, b, _, _ = tl.randint4x(seed, offset)
    tl.store(words + offset, a)
    tl.store(words + n + offset, b)
