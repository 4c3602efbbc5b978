"""The gated activation `act(gate) * up` as one Triton kernel: a program has a block of columns of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.rows import evenly_spaced_rows_of
from piecegraph.passes.kernels.elementwise.gated import gated

BLOCK = 1024
"""The columns of a program: in 2-byte types a thread of its four warps loads 16 bytes of each half at once."""


def act_mul_on_gpu(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Run `ops.act_mul.act_mul` on a GPU."""
    size = gate_up.shape[-1] // 2
    result = gate_up.new_empty((*gate_up.shape[:-1], size))
    rows = evenly_spaced_rows_of(gate_up)
    if rows.num_rows == 0 or size == 0:
        return result
    block = min(BLOCK, triton.next_power_of_2(size))
    _act_mul[(rows.num_rows, triton.cdiv(size, block))](
        result,
        rows.tensor,
        rows.outer_stride,
        ACTIVATION=activation,
        SIZE=size,
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )
    return result


@own_kernel
@triton.jit
def _act_mul(  # type: ignore[no-untyped-def]  # compiled by Triton
    result,  # [num_rows, SIZE], written
    gate_up,  # [num_rows, 2 * SIZE], its rows gate_up_stride apart
    gate_up_stride,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + row * SIZE + columns, gated(gate, up, ACTIVATION).to(result.dtype.element_ty), mask=mask)
