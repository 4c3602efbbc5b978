"""The gated activation `act(gate) * up`, rounded to int8 or to e4m3, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.rows import evenly_spaced_rows_of
from piecegraph.passes.kernels.elementwise.gated import gated
from piecegraph.passes.kernels.quantised.rounded_rows import largest_value, rounded_groups

BLOCK = 1024
"""The columns of a program, if groups are shorter."""


def act_mul_rounded_on_gpu(
    gate_up: torch.Tensor, activation: str, group: int, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.quantised.rounded_act_mul.act_mul_rounded` on a GPU; `group`: the columns that share a scale."""
    size = gate_up.shape[-1] // 2
    num_groups = triton.cdiv(size, group)
    values = gate_up.new_empty((*gate_up.shape[:-1], size), dtype=stored)
    step = gate_up.new_empty((*gate_up.shape[:-1], num_groups), dtype=torch.float32)
    rows = evenly_spaced_rows_of(gate_up)
    if rows.num_rows == 0:
        return values, step
    columns = triton.next_power_of_2(group)
    groups = min(max(BLOCK // columns, 1), triton.next_power_of_2(num_groups))
    _act_mul_rounded.launch(
        (rows.num_rows, triton.cdiv(num_groups, groups), 1),
        (rows.tensor, values, step, rows.outer_stride, size, group, num_groups),
        {"ACTIVATION": activation, "GROUPS": groups, "COLUMNS": columns, "MOST": largest_value(stored)},
        num_warps=min(max(groups * columns // 256, 1), 16),
    )
    return values, step


@own_kernel
@triton.jit
def act_mul_rounded_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    gate_up,  # [num_rows, 2 * size], its rows gate_up_stride apart
    values,  # [num_rows, size] int8 or e4m3, written
    step,  # [num_rows, num_groups] float32, written
    gate_up_stride,
    size,
    group,
    num_groups,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # of a group, padded to a power of two
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (rows, blocks of GROUPS groups). The activation is rounded to the dtype of `gate_up` before its scale is
    taken."""
    IS_INTEGER: tl.constexpr = values.dtype.element_ty == tl.int8
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, COLUMNS)
    column = groups[:, None] * group + within[None, :]
    mask = (within < group)[None, :] & (column < size)
    source = gate_up + row * gate_up_stride + column
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    numbers = gated(gate, up, ACTIVATION).to(gate_up.dtype.element_ty).to(tl.float32)
    stored, each = rounded_groups(numbers, 1, MOST, IS_INTEGER)
    tl.store(values + row * size + column, stored, mask=mask)
    tl.store(step + row * num_groups + groups, each, mask=groups < num_groups)


_act_mul_rounded = OverlappedKernel(act_mul_rounded_kernel)
