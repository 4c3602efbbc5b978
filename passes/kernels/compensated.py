"""Sums of products of float32 numbers that are as exact for many terms as for few.

On float32 numbers `tl.dot` adds one product after another to what is there, so that a sum of n loses in proportion to
the square root of n, where a library sums in parts. Adding the dots of parts would not do: Triton folds such a sum
back into one chain.

Source: W. Kahan, Further remarks on reducing truncation errors, 1965.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.own_kernel import own_kernel


@own_kernel
@triton.jit
def add_dot(  # type: ignore[no-untyped-def]  # compiled by Triton
    total,  # [m, n] float32
    lost,  # [m, n] float32: by how much too large `total` is; of zeros at first
    a,  # [m, k]
    b,  # [k, n]
):
    """`total` and `lost` with `a @ b` added. Of operands in float32, `k` products are added up one after another, so it
    should be 16, the fewest that `tl.dot` takes. Those of other operands tensor cores add to `total`."""
    if a.dtype == tl.float32:
        part = tl.dot(a, b, input_precision="ieee") - lost
        whole = total + part
        lost = (whole - total) - part
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)  # of an overflow nothing is left to make up for
        total = whole
    else:
        total = tl.dot(a, b, total)
    return total, lost
