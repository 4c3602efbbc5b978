"""Rotary tables as one Triton kernel: each angle is computed once, and its cosine and sine stored in both halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel

ANGLES = 256
"""The angles of a program, unless a row has more: two for each thread of its four warps."""


def rotary_tables_on_gpu(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ops.rotary_tables.rotary_tables` on a GPU."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    cos = inv_freq.new_empty((num_tokens, 2 * half))
    sin = torch.empty_like(cos)
    if num_tokens == 0 or half == 0:
        return cos, sin
    columns = triton.next_power_of_2(half)
    rows = max(ANGLES // columns, 1)
    _rotary_tables.launch(
        (triton.cdiv(num_tokens, rows), 1, 1),
        (cos, sin, positions.contiguous(), inv_freq.contiguous(), num_tokens, scaling),
        {"HALF": half, "ROWS": rows, "COLUMNS": columns},
        num_warps=4,
    )
    return cos, sin


# Tokens come and go from step to step: one compilation serves any number.
@own_kernel
@triton.jit(do_not_specialize=["num_tokens"])
def rotary_tables_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    cos,  # [num_tokens, 2 * HALF] float32, written
    sin,  # [num_tokens, 2 * HALF] float32, written
    positions,  # [num_tokens] int64
    inv_freq,  # [HALF] float32
    num_tokens,
    scaling,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # HALF, padded to a power of two
    OVERLAP: tl.constexpr,
):
    """Grid: (blocks of ROWS tokens,). `tl.cos` and `tl.sin` reduce float32 over its full range."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_tokens
    columns = tl.arange(0, COLUMNS)
    is_column = columns < HALF
    mask = is_row[:, None] & is_column[None, :]
    to = rows.to(tl.int64)[:, None] * (2 * HALF) + columns[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + rows, mask=is_row, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + columns, mask=is_column, other=0.0)
    angle = position[:, None] * frequency[None, :]
    cosine = tl.cos(angle) * scaling
    sine = tl.sin(angle) * scaling
    tl.store(cos + to, cosine, mask=mask)
    tl.store(cos + to + HALF, cosine, mask=mask)
    tl.store(sin + to, sine, mask=mask)
    tl.store(sin + to + HALF, sine, mask=mask)


_rotary_tables = OverlappedKernel(rotary_tables_kernel)
