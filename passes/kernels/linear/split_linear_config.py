"""The choice of linears whose sums are split over programs, for a norm to add: a pure function, swept on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from piecegraph.passes.kernels.common.gpu_limits import SMALL_WEIGHT_BYTES, GpuLimits
from piecegraph.passes.kernels.linear.linear_config import (
    SLICED_ROWS,
    WAVE_AHEAD,
    WAVE_COLUMNS,
    WAVE_FILL,
    WAVE_SHARED_BYTES,
)
from piecegraph.passes.kernels.linear.streamed_config import MAX_ROWS as MAX_STREAMED_ROWS

MAX_ROWS = 256
"""The most rows for which sums are split; more rows make enough programs without a split."""

BLOCK_M = 64
BLOCK_K = 128

NUM_STAGES = 5
"""The tiles in flight, including the one at work, if a program may have the memory."""

MIN_TILES = 4
"""The fewest tiles of a part: for shorter parts, writing and adding take longer than reading."""

NARROW_BYTES = 20 * 2**20
"""The most bytes of rows that narrow column blocks may read in total, since each column of programs reads them once.
Beyond that, blocks are wide."""

LARGEST_BYTES = 128 * 2**20
"""The most bytes of a weight that is split for one wave of programs with all rows each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    block_m: int
    block_n: int  # columns of the result a program
    block_k: int
    num_parts: int
    num_tiles: int  # of a part, `block_k` numbers each
    num_warps: int = 4
    num_stages: int = NUM_STAGES
    num_ahead: int = 0  # tiles that are prefetched before the wait; 0: all of the part


@lru_cache(maxsize=4096)
def split_config(num_rows: int, num_columns: int, size: int, *, itemsize: int, gpu: GpuLimits) -> SplitConfig | None:
    """Return the layout for `[num_rows, size] @ [num_columns, size].T`, or None where one part is as fast."""
    if (
        not SLICED_ROWS < num_rows <= MAX_ROWS
        or itemsize != 2
        or size % BLOCK_K
        or num_columns % 64
        or num_columns == 0
    ):
        return None
    if num_columns * size * itemsize > SMALL_WEIGHT_BYTES:
        return _wave_config(num_rows, num_columns, size, num_columns * size * itemsize, gpu)
    tiles = size // BLOCK_K
    is_narrow = num_columns // 32 * num_rows * size * itemsize <= NARROW_BYTES
    for block_n in (32, 64) if is_narrow else (64,):
        num_stages = min(NUM_STAGES, gpu.shared_bytes // ((BLOCK_M + block_n) * BLOCK_K * itemsize))
        if num_stages < 2:
            return None
        programs = -(-num_rows // BLOCK_M) * (num_columns // block_n)
        for parts in range(min(gpu.num_sms // programs, tiles // MIN_TILES), 1, -1):
            if tiles % parts == 0:
                return SplitConfig(
                    block_m=BLOCK_M,
                    block_n=block_n,
                    block_k=BLOCK_K,
                    num_parts=parts,
                    num_tiles=tiles // parts,
                    num_stages=num_stages,
                )
    return None


def _wave_config(num_rows: int, num_columns: int, size: int, weight_bytes: int, gpu: GpuLimits) -> SplitConfig | None:
    """Return the layout for 33 to 64 rows of a large weight in one wave of programs with all rows each, or None.

    `linear_config.py` says what such a wave is worth, and None means what it does there.
    """
    if not gpu.can_overlap or gpu.shared_bytes < WAVE_SHARED_BYTES or weight_bytes > LARGEST_BYTES:
        return None
    if not MAX_STREAMED_ROWS < num_rows <= BLOCK_M:
        return None
    tiles, programs = size // BLOCK_K, num_columns // WAVE_COLUMNS
    for parts in range(min(gpu.num_sms // programs, tiles // MIN_TILES), 1, -1):
        if tiles % parts == 0 and programs * parts >= WAVE_FILL * gpu.num_sms:
            return SplitConfig(
                block_m=BLOCK_M, block_n=WAVE_COLUMNS, block_k=BLOCK_K, num_parts=parts, num_tiles=tiles // parts,
                num_stages=WAVE_SHARED_BYTES // ((BLOCK_M + WAVE_COLUMNS) * BLOCK_K * 2), num_ahead=WAVE_AHEAD,
            )  # fmt: skip
    return None
