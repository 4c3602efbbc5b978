"""A linear of some dozens of rows whose sums are split over programs; each writes its part, and the reader adds them.

Few columns make few programs, each of which would read long rows alone while most multiprocessors idle. Parts are added
in the order of their numbers, so results are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel
from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.passes.kernels.common.ptx import prefetch
from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig


def split_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size], contiguous
    config: SplitConfig,
) -> torch.Tensor:
    """Return float32 `[num_parts, num_rows, num_columns]`, whose sum over parts is `x @ weight.T`."""
    num_rows, size = x.shape
    num_columns = weight.shape[0]
    parts = x.new_empty((config.num_parts, num_rows, num_columns), dtype=torch.float32)
    _split.launch(
        (num_columns // config.block_n, config.num_parts, triton.cdiv(num_rows, config.block_m)),
        (x, weight, parts, num_columns, size, num_rows, config.num_tiles),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.num_stages,
            "AHEAD": config.num_ahead,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return parts


@own_kernel
@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def split_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, size]
    parts,  # [parts, num_rows, num_columns] float32, written
    num_columns,  # a multiple of BLOCK_N
    size,  # parts * num_tiles * BLOCK_K
    num_rows,
    num_tiles,  # of a part
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles of the part that are prefetched before the wait; 0: all of them
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks, parts, row blocks). Weights are prefetched before the wait."""
    part = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (row < num_rows)[:, None]
    at = part * num_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    weights = weight + column[:, None].to(tl.int64) * size + at[None, :]
    values = x + row[:, None].to(tl.int64) * size + at[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        lines = weight + column[:, None].to(tl.int64) * size + part * num_tiles * BLOCK_K
        for tile in range(tl.minimum(AHEAD, num_tiles) if AHEAD else num_tiles):
            prefetch(lines + tile * BLOCK_K + (tl.arange(0, BLOCK_K // 64) * 64)[None, :])  # of 128 bytes
        gdc_wait()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        w = tl.load(weights + tile * BLOCK_K)
        v = tl.load(values + tile * BLOCK_K, mask=is_row, other=0.0)
        total = tl.dot(v, tl.trans(w), total)
    to = parts + (part * num_rows + row[:, None]).to(tl.int64) * num_columns + column[None, :]
    tl.store(to, total, mask=is_row)


_split = OverlappedKernel(split_kernel)
