"""Linears with a handful of columns, such as a shared expert's gate, for any number of rows.

The library's kernels for them are old and slow: cuBLAS takes 0.65 ms for 8,192 rows of 2,048 numbers and one column,
which can be read in 10 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

MAX_BLOCK = 2048
"""The most numbers of a row that a program reads at a time: 16 a thread of 4 warps."""


def narrow_linear_on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias` for `x` `[num_rows, size]`, contiguous, and a few rows of `weight`, contiguous."""
    (num_rows, size), num_columns = x.shape, weight.shape[0]
    out = x.new_empty((num_rows, num_columns))
    if num_rows:
        _narrow.launch(
            (num_rows, 1, 1),
            (x, weight, bias, out, size),
            {"NUM_COLUMNS": num_columns, "BLOCK": min(MAX_BLOCK, triton.next_power_of_2(size))},
            num_warps=4,
        )
    return out


@own_kernel
@triton.jit
def narrow_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [NUM_COLUMNS, size]
    bias,  # [NUM_COLUMNS], or None
    out,  # [num_rows, NUM_COLUMNS], written
    size,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (rows,). Products and sums in float32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    for column in tl.static_range(NUM_COLUMNS):
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            is_inside = start + at < size
            values = tl.load(x + row * size + start + at, mask=is_inside, other=0.0).to(tl.float32)
            weights = tl.load(weight + column * size + start + at, mask=is_inside, other=0.0).to(tl.float32)
            products += values * weights
        total = tl.sum(products, 0)
        if bias is not None:
            total += tl.load(bias + column).to(tl.float32)
        tl.store(out + row * NUM_COLUMNS + column, total.to(out.dtype.element_ty))


_narrow = OverlappedKernel(narrow_kernel)
