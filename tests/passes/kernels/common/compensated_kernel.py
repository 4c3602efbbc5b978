"""A product of two matrices by `compensated.py`. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.compensated import add_dot


@triton.jit  # type: ignore[untyped-decorator]
def product(a, b, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """`a @ b`: of `[16, SIZE]` and `[SIZE, 16]`."""
    at = tl.arange(0, 16)
    total = tl.zeros([16, 16], tl.float32)
    lost = tl.zeros([16, 16], tl.float32)
    for start in range(0, SIZE, 16):
        rows = tl.load(a + at[:, None] * SIZE + start + at[None, :])
        columns = tl.load(b + (start + at)[:, None] * 16 + at[None, :])
        total, lost = add_dot(total, lost, rows, columns)
    tl.store(out + at[:, None] * 16 + at[None, :], total)
