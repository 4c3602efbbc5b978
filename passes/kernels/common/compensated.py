"""Sums of products of float32 numbers that are as exact for many terms as for few.

On float32 numbers `tl.dot` adds one product after another, so that a sum of n terms loses accuracy in proportion to the
square root of n, where a library sums in parts. Adding the dots of parts would not help: Triton folds such a sum back
into one chain.

Source: W. Kahan, Further remarks on reducing truncation errors, 1965.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit
def add_dot(  # type: ignore[no-untyped-def]  # compiled by Triton
    total,  # [m, n] float32
    lost,  # [m, n] float32: by how much too large `total` is; of zeros at first
    a,  # [m, k]
    b,  # [k, n]
):
    """Return `total` and `lost` with `a @ b` added.

    For float32 operands, `k` products are added one after another, so `k` should be 16, the least that `tl.dot` takes.
    Products of other dtypes are added to `total` by tensor cores.
    """
    if a.dtype == tl.float32:
        part = tl.dot(a, b, input_precision="ieee") - lost
        whole = total + part
        lost = (whole - total) - part
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)  # of an overflow nothing is left to make up for
        total = whole
    else:
        total = tl.dot(a, b, total)
    return total, lost
