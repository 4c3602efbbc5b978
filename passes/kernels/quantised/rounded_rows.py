"""Rows rounded to int8 or to e4m3, with a scale for each row or for each group of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

MAX_INT8_STEPS = 127.5
"""The largest magnitude of a row over this is the scale of int8 values: half of 127 - (-128)."""

MAX_E4M3 = 448.0
"""The largest finite value of e4m3."""

BLOCK = 4096
"""The most columns that a program holds at one time."""


def largest_value(dtype: torch.dtype) -> float:
    """Return the number that the largest magnitude of a group becomes in `dtype`, int8 or e4m3."""
    return MAX_INT8_STEPS if dtype is torch.int8 else MAX_E4M3


def rounded_rows_on_gpu(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values `[num_rows, size]` in `dtype`, and scales `[num_rows, groups]` float32.

    `x` is `[num_rows, size]`; `group` the columns that share a scale, of which the last ones may be fewer; `dtype` int8
    or float8_e4m3fn. Of a group with a number that is not finite, the scale is NaN.
    """
    num_rows, size = x.shape
    num_groups = triton.cdiv(size, group)
    values = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    step = x.new_empty((num_rows, num_groups), dtype=torch.float32)
    if num_rows == 0:
        return values, step
    block = min(BLOCK, triton.next_power_of_2(group))
    _round_rows.launch(
        (num_rows, num_groups, 1),
        (x.contiguous(), values, step, size, group),
        {
            "BLOCK": block,
            "IS_INTEGER": dtype is torch.int8,
            "MOST": largest_value(dtype),
        },
        num_warps=min(max(block // 256, 1), 8),
    )
    return values, step


@own_kernel
@triton.jit
def rounded(  # type: ignore[no-untyped-def]  # compiled by Triton
    numbers,  # float32
    step,  # float32, broadcastable to it
    IS_INTEGER: tl.constexpr,
):
    """Return `numbers / step` as what is stored: an integer from -128 to 127, or e4m3 (float8e4nv)."""
    near = tl.div_rn(numbers, step)
    if IS_INTEGER:
        near = (near + 12582912.0) - 12582912.0  # half to even, for magnitudes below 2 ** 22
        stored = tl.minimum(tl.maximum(near, -128.0), 127.0).to(tl.int8)
    else:
        stored = tl.minimum(tl.maximum(near, -448.0), 448.0).to(tl.float8e4nv)
    return stored


@own_kernel
@triton.jit
def rounded_groups(  # type: ignore[no-untyped-def]  # compiled by Triton
    numbers,  # float32
    AXIS: tl.constexpr,  # the last one, along which numbers share a scale
    MOST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Return numbers as what is stored, and the scales of their groups; NaN for a group that is not finite."""
    spoilt = tl.sum(numbers * 0.0, AXIS)  # a maximum would hide it
    each = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), AXIS), MOST), 1e-12) + spoilt
    return rounded(numbers, tl.expand_dims(each, AXIS), IS_INTEGER), each


@own_kernel
@triton.jit
def round_rows_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    values,  # [num_rows, size] int8 or e4m3, written
    step,  # [num_rows, num_groups] float32, written
    size,
    group,
    BLOCK: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (rows, groups)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, size)
    at = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    largest = tl.zeros([BLOCK], tl.float32)
    spoilt = tl.zeros([BLOCK], tl.float32)  # NaN where a number is not finite, which a maximum would hide
    for start in range(first, last, BLOCK):
        numbers = tl.load(x + row * size + start + at, mask=start + at < last, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
        spoilt += numbers * 0.0
    each = tl.maximum(tl.div_rn(tl.max(largest, 0), MOST), 1e-12) + tl.sum(spoilt, 0)
    tl.store(step + row * tl.num_programs(1) + tl.program_id(1), each)
    for start in range(first, last, BLOCK):
        numbers = tl.load(x + row * size + start + at, mask=start + at < last, other=0.0).to(tl.float32)
        tl.store(values + row * size + start + at, rounded(numbers, each, IS_INTEGER), mask=start + at < last)


_round_rows = OverlappedKernel(round_rows_kernel)
