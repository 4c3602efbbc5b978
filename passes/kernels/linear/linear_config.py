"""The choice of a linear's kernel and of its layout: a pure function of shapes, after sweeps on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from piecegraph.passes.kernels.common.gpu_limits import MIDDLE_WEIGHT_BYTES, SMALL_WEIGHT_BYTES, GpuLimits
from piecegraph.passes.kernels.linear.streamed_config import LONGEST_NORMED, StreamedConfig, streamed_config
from piecegraph.passes.kernels.linear.streamed_config import MAX_ROWS as MAX_STREAMED_ROWS

MATVEC_ROWS = 2
"""The most rows for which a dot product on ordinary cores pays off; with four rows it computes longer than it reads."""

NARROW_COLUMNS = 4
"""The most columns for which each row is a few dot products on ordinary cores, however many rows there are."""

SLICED_ROWS = 16
"""The most rows (two at least) for which, if the weight has whole tiles, a program requests all that it reads of the
weight before the wait."""

BLOCK_M = 64
"""The rows of a program of the matmul: what the tensor cores take, also where most rows are padding."""

TALL_ROWS = 256
"""The most rows for which blocks may be taller, in one wave of programs.

This serves a gated linear, whose activation would be one more kernel, and linears for which lower blocks need a second
wave. The library's matmul is faster, but nothing starts while it runs (query, key and value of Qwen3-0.6B at 128 rows:
3.6 us of a layer's 109).
"""

FEW_PROGRAMS_BYTES = 8 * 2**20
"""The most bytes of a small weight whose programs have four columns each. A larger one makes programs enough with two
columns each: a layer with an output projection of 4,096 columns of 2,048 numbers took 79.5 us with four and 77.2 with
two (H200)."""

NUM_SLICES = 4
"""The warps of a program that has all rows."""

SLICED_SHARED_BYTES = 96 * 2**10
"""The most shared memory that a program with all rows takes."""

HELD_REGISTERS = 128
"""The registers of a thread for weights that it holds while it waits."""

NORMED_WEIGHT_BYTES = 128 * 2**20
"""The most bytes of an ungated weight for which each program norms the one row. A head has tens of thousands of
programs, and took 35 us longer for it (Qwen3-0.6B)."""

WAVE_COLUMNS = 64
"""The columns of a program that has all rows, `BLOCK_M` at most, and a multiprocessor to itself.

The library's kernels start when the preceding one has ended; by then these programs have prefetched their first tiles.
With them for query, key and value, and in parts for output and down, a layer of Llama-8B took 167.7 us at 64 rows where
the library's linears took 173.3, and 156.4 and 163.6 at 40 (H200, 2026-11-29, each graph replayed for 0.3 s or more
before it was timed). At 128 rows, where the GPU is at its power limit, each of the three took from 1.0 us less to 1.9
more.
"""

WAVE_GATED_COLUMNS = 128
"""The columns of a program that has all of up to `WAVE_GATED_ROWS` rows of a large gated weight.

A layer of Llama-8B took 222.2 and 221.5 us with it at 128 rows, and 225.1 and 226.7 with the library's matmul and the
activation's kernel (two turns, H200, 2026-11-29).
"""

WAVE_GATED_ROWS = 2 * BLOCK_M
"""The most rows of such a program: what two groups of four warps multiply."""

WAVE_SHARED_BYTES = 192 * 2**10
"""The shared memory of such programs."""

WAVE_FILL = 0.7
"""The least share of the multiprocessors that such programs take.

In short runs at 128 rows 96 programs gained 1 to 2 us of a layer (query, key and value of Llama-8B and Qwen3-4B), and
80 gained 0.4 (the output projection of Qwen3-4B in two parts).
"""

WAVE_GATED_FILL = 0.8
"""The same for a gated weight: 112 programs gained (Llama-8B), and 96 and 76 lost (Qwen3-8B and 4B)."""

WAVE_AHEAD = 4
"""The tiles that such a program prefetches before the wait. Without, a layer of Llama-8B took 0.9 us longer (output
projection, 128 rows); with 8 the linear by itself took longer."""

SIZE_MULTIPLE = 64
"""The number of which a row's size must be a multiple. Tiles are this wide, or twice as wide where that divides the
size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """The layout of a matvec or matmul kernel. `block_m` is 0 for matvec, which takes all rows in one program."""

    block_m: int
    block_n: int  # columns of the result a program
    block_k: int
    num_warps: int
    num_stages: int
    num_ahead: int = 0  # tiles of the weight that a matmul prefetches before the wait; 0: all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedConfig:
    """The layout of the kernel in which each warp has a slice of a tile, and one program has all rows."""

    block_m: int
    block_n: int  # columns of the result a program
    num_slices: int
    block_k: int  # numbers of a slice; all slices of all tiles are a row
    num_tiles: int
    num_held: int  # tiles in registers before the wait


Config = LinearConfig | SlicedConfig | StreamedConfig


@lru_cache(maxsize=4096)
def linear_config(
    num_rows: int,
    num_columns: int,
    size: int,
    *,
    is_gated: bool,
    itemsize: int,
    gpu: GpuLimits,
    is_normed: bool = False,
) -> Config | None:
    """Return the layout for `[num_rows, size] @ [num_columns, size].T`, or None.

    None means that the library is at least as fast in a model's graph. With `is_gated` the weight has twice as many
    columns; `is_normed` says that a norm is the preceding kernel.
    """
    weight_bytes = num_columns * size * itemsize * (2 if is_gated else 1)
    if itemsize != 2 or size % SIZE_MULTIPLE or num_columns % 16 or num_rows == 0:
        return None
    streamed = streamed_config(
        num_rows, num_columns, size, is_gated=is_gated, itemsize=itemsize, gpu=gpu, is_normed=is_normed
    )
    if streamed is not None:
        return streamed
    if num_rows == 1:
        return _row_config(size, weight_bytes, is_gated=is_gated)
    if weight_bytes > SMALL_WEIGHT_BYTES:
        return _wave_config(num_rows, num_columns, size, weight_bytes, is_gated=is_gated, gpu=gpu)
    if num_rows <= SLICED_ROWS:
        sliced = _sliced_config(num_columns, size, is_gated=is_gated, gpu=gpu)
        if sliced is not None:
            return sliced
    if num_rows <= MATVEC_ROWS:
        block_k = 1024 if is_gated or size < 2048 else 2048
        return LinearConfig(block_m=0, block_n=4, block_k=block_k, num_warps=4, num_stages=1)
    if is_gated and BLOCK_M < num_rows <= 2 * BLOCK_M:
        paired = _paired_config(num_columns, size, gpu=gpu)
        if paired is not None and -(-num_rows // BLOCK_M) * -(-num_columns // paired.block_n) <= 2 * gpu.num_sms:
            return paired
    for is_tall in (True,) if is_gated else (False, True):
        matmul = _matmul_config(num_rows, num_columns, size, is_gated=is_gated, is_tall=is_tall, gpu=gpu)
        programs = -(-num_rows // matmul.block_m) * -(-num_columns // matmul.block_n)
        is_full = is_gated or not is_tall or programs * 10 >= 7 * gpu.num_sms
        if programs <= gpu.num_sms and is_full and matmul.num_stages >= 2:
            return matmul
    return None  # a second wave: the library's larger tiles read each weight once


def norm_linear_config(size: int, weight_bytes: int, *, is_gated: bool) -> LinearConfig | None:
    """Return the layout for one row of `size` numbers of two bytes that is normed in the same kernel, or None.

    None means that norming in every program takes longer than a separate norm, as in a head of many programs of few
    columns, or for a row of more than `LONGEST_NORMED` numbers.
    """
    if size > LONGEST_NORMED or (weight_bytes > NORMED_WEIGHT_BYTES and not is_gated):
        return None
    if weight_bytes > SMALL_WEIGHT_BYTES:  # every program reads the row twice: in one tile, by four warps, at once
        block_k = 4096 if size > 2048 else 2048
        return LinearConfig(block_m=0, block_n=2, block_k=block_k, num_warps=4, num_stages=1)
    block_k = 1024 if is_gated or size < 2048 else 2048
    num_warps = 2 if is_gated and size <= 1024 else 4
    return LinearConfig(block_m=0, block_n=4, block_k=block_k, num_warps=num_warps, num_stages=1)


def _row_config(size: int, weight_bytes: int, *, is_gated: bool) -> LinearConfig:
    """Return the layout for one row.

    A program of one warp sums without waiting for others; a large weight has many such programs.
    """
    if weight_bytes > SMALL_WEIGHT_BYTES:
        block_n, block_k, num_warps = (4 if is_gated else 8, 512, 1) if size <= 1024 else (2, 1024, 1)
        if size > 1024 and not is_gated and weight_bytes <= MIDDLE_WEIGHT_BYTES:
            block_n = 1
    elif size <= 1024:
        block_n, block_k, num_warps = (4, 512, 2) if is_gated else (4, 1024, 1)
    elif is_gated:
        block_n, block_k, num_warps = 4, 1024, 4
    elif size <= 2048:
        block_n, block_k, num_warps = 4 if weight_bytes <= FEW_PROGRAMS_BYTES else 2, 2048, 2
    else:
        block_n, block_k, num_warps = 8, 2048, 8
    return LinearConfig(block_m=0, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=1)


def _wave_config(
    num_rows: int, num_columns: int, size: int, weight_bytes: int, *, is_gated: bool, gpu: GpuLimits
) -> LinearConfig | None:
    """Return the layout for dozens of rows of a large weight in one wave of programs with all rows each, or None.

    None means that the kernel does not apply (kernels do not overlap, little shared memory, a size of no whole tiles),
    or was no faster than the library where it was swept: other numbers of rows, larger weights that are not gated,
    programs that take few of the multiprocessors or more than one wave.
    """
    if not gpu.can_overlap or gpu.shared_bytes < WAVE_SHARED_BYTES:
        return None
    if is_gated:
        block_m, block_n, block_k, num_warps = WAVE_GATED_ROWS, WAVE_GATED_COLUMNS, 64, 8
        if not BLOCK_M < num_rows <= WAVE_GATED_ROWS:
            return None
    else:
        block_m, block_n, block_k, num_warps = BLOCK_M, WAVE_COLUMNS, 128, 4
        if not MAX_STREAMED_ROWS < num_rows <= BLOCK_M or weight_bytes > MIDDLE_WEIGHT_BYTES:
            return None
    fill = -(-num_columns // block_n) / gpu.num_sms
    if size % block_k or not (WAVE_GATED_FILL if is_gated else WAVE_FILL) <= fill <= 1:
        return None
    num_stages = WAVE_SHARED_BYTES // ((block_m + block_n * (2 if is_gated else 1)) * block_k * 2)
    return LinearConfig(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages,
        num_ahead=WAVE_AHEAD,
    )  # fmt: skip


def _matmul_config(
    num_rows: int, num_columns: int, size: int, *, is_gated: bool, is_tall: bool, gpu: GpuLimits
) -> LinearConfig:
    """Return a layout with blocks of rows, with one stage where a program may not have the shared memory of two."""
    block_m, block_n, block_k, num_warps, most_stages = BLOCK_M, 32, 128, 4, 4 if is_gated else 6
    if is_tall and BLOCK_M < num_rows <= TALL_ROWS:
        block_m, block_n, block_k, num_warps = 2 * BLOCK_M, 32 if num_rows <= 2 * BLOCK_M else 64, 64, 8
        most_stages = 4 if is_gated and block_n == 64 else 6
    elif num_columns < 2048:
        block_n = 16
    if size % block_k:
        block_k = SIZE_MULTIPLE
    stage_bytes = (block_m + block_n * (2 if is_gated else 1)) * block_k * 2
    num_stages = max(1, min(most_stages, gpu.shared_bytes // stage_bytes))
    return LinearConfig(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def _paired_config(num_columns: int, size: int, *, gpu: GpuLimits) -> LinearConfig | None:
    """Return the layout for a gated linear with low blocks, or None.

    Each multiprocessor has two programs, of which one loads while the other multiplies (0.4 of 105.7 us of a layer of
    Qwen3-0.6B at 128 rows).
    """
    config = LinearConfig(block_m=BLOCK_M, block_n=32, block_k=128, num_warps=4, num_stages=3)
    bytes_of_two = 2 * (config.block_m + 2 * config.block_n) * config.block_k * 2 * config.num_stages
    return config if size % config.block_k == 0 and bytes_of_two <= gpu.shared_bytes else None


def _sliced_config(num_columns: int, size: int, *, is_gated: bool, gpu: GpuLimits) -> SlicedConfig | None:
    """Return a layout with one program on nearly every multiprocessor, a quarter of its registers for weights, or None.

    None means that `size` is not a whole number of tiles, or that a program may not have the shared memory through
    which weights reach the tensor cores.
    """
    if gpu.shared_bytes < SLICED_SHARED_BYTES:
        return None
    block_n = 8
    while block_n < (16 if is_gated else 32) and num_columns // (2 * block_n) * 10 >= 9 * gpu.num_sms:
        block_n *= 2
    block_k = next((k for k in (256, 128, 64) if size % (NUM_SLICES * k) == 0 and k * block_n <= 4096), None)
    if block_k is None:
        return None
    num_tiles = size // (NUM_SLICES * block_k)
    tile_registers = block_n * (2 if is_gated else 1) * block_k // 64  # of a thread
    return SlicedConfig(
        block_m=SLICED_ROWS,
        block_n=block_n,
        num_slices=NUM_SLICES,
        block_k=block_k,
        num_tiles=num_tiles,
        num_held=min(num_tiles, max(1, HELD_REGISTERS // tile_registers), 3),
    )
