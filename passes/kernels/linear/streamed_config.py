"""The choice of linears that are streamed (`streamed_linear.py`), and of their layouts: pure functions of shapes.

The layouts were swept on an H200 within a model's layers. Half of a layout's worth is what the kernel loads before the
preceding kernel has ended, and the room it leaves to the following one: the layouts that were fastest in a chain of one
linear were not the fastest in a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from piecegraph.passes.kernels.common.gpu_limits import MIDDLE_WEIGHT_BYTES, SMALL_WEIGHT_BYTES, GpuLimits

MAX_ROWS = 32
"""The most rows of an ungated weight: with more, programs read the rows for as long as their weights."""

MAX_GATED_ROWS = 64
"""The most rows of a large gated weight, for which the library's activation would be one more kernel."""

FEW_ROWS = 8
"""The most rows for which a large gated weight has tiles of 128 lines."""

SHORT_ROWS = 16
"""The most rows for which small weights are streamed whole, and long sums of them in parts."""

LONG_SIZE = 3072
"""The least size whose sums are split for up to `SHORT_ROWS` rows of a small weight."""

LONE_ROW_BYTES = 48 * 2**20
"""The bytes of a weight above which one row is streamed where no norm is the preceding kernel. Streamed, an output
projection of 32 MiB took 10 us longer behind attention, and a down projection of 56 MiB took 7 us less (H100)."""

LONG_ROW = 3584
"""The least numbers of a row of an ungated weight whose tiles are twice as long.

The kernel asks L2 for a tile of `x` in each turn of its loop, one tile ahead, so a row of many tiles waits for L2
rather than for memory: a layer of half of Llama-8B took 79.9 us with tiles of 256 numbers for `down`, and 75.5 with
tiles of 512 (one row, H200). With more than `SHORT_ROWS` rows long tiles of `x` take the room of the weight's: a layer
of Llama-8B took 142.5 us at 32 rows without them, and 145.1 with them.
"""

LONG_TILE = 512
"""The numbers of a row in a long tile; three of them fill a multiprocessor's shared memory."""

JOINED_COLUMNS = 32
"""The columns of a program that has both halves of a gated weight in one tile."""

LONGEST_NORMED = 5120
"""The most numbers of one row that each program of a linear norms by itself.

A row of 8,192 takes registers for three programs a multiprocessor instead of four, and each waits longer for its norm:
with Llama-70B's weights on two H200 one row took 31.9 ms a step, and eight rows, normed apart and streamed, 18.5.
"""

MIN_TILES = 3
"""The fewest tiles of a part."""

MIN_FILL = 0.45
"""The least share of the multiprocessors that have a program."""

LAST_FILL = 0.8
"""The least share of the places of several waves that have a program. A last wave that is half empty still reads memory
at full speed; one of a few programs does not."""

WIDE_FILL = 0.7
"""The least share of multiprocessors for an ungated weight in one part, below which other kernels spread it better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedConfig:
    """The layout of a streamed linear: the weight is the tensor cores' left operand, and one program has all rows of
    `x`."""

    block_m: int  # rows of `x`, padded: 16 or more, but 8 for few rows of a large gated weight
    block_n: int  # lines of the left operand, rows of the weight or zeros: a multiple of 64
    num_columns: int  # of the result a program; it reads as many lines, of each half if gated, and the rest are zeros
    is_joined: bool = False  # gated: both halves of the weight in one tile, a line each for a column; else a tile each
    block_k: int
    num_stages: int
    num_warps: int = 4
    num_parts: int = 1  # programs among which a row's numbers are divided


@lru_cache(maxsize=4096)
def streamed_config(
    num_rows: int,
    num_columns: int,
    size: int,
    *,
    is_gated: bool,
    itemsize: int,
    gpu: GpuLimits,
    is_normed: bool = False,
) -> StreamedConfig | None:
    """Return the layout for `[num_rows, size] @ [num_columns, size].T`, or None.

    None means that another kernel, or the library, is at least as fast in a model's graph. With `is_gated` the weight
    has twice as many columns; `is_normed` says that a norm is the preceding kernel. One row is streamed if its weight
    has more than `SMALL_WEIGHT_BYTES`, behind a norm or gated, or more than `LONE_ROW_BYTES` otherwise. Of these, a row
    of up to `LONGEST_NORMED` numbers, which programs can norm themselves, is streamed only over a weight of up to
    `MIDDLE_WEIGHT_BYTES`, or a gated one whose programs all run at once.
    """
    if itemsize != 2 or not gpu.can_overlap or num_rows == 0:
        return None
    weight_bytes = num_columns * size * itemsize * (2 if is_gated else 1)
    if num_rows == 1:
        if weight_bytes <= (SMALL_WEIGHT_BYTES if is_normed or is_gated else LONE_ROW_BYTES):
            return None
        is_one_wave = _is_joined(num_columns, gpu) if is_gated else weight_bytes <= MIDDLE_WEIGHT_BYTES
        if size <= LONGEST_NORMED and not is_one_wave:
            return None
    choose = _gated_config if is_gated else _plain_config
    config = choose(num_rows, num_columns, size, weight_bytes, gpu)
    if config is None or not _fits(config, num_columns, size, gpu, is_gated=is_gated):
        return None
    return config


def _gated_config(
    num_rows: int, num_columns: int, size: int, weight_bytes: int, gpu: GpuLimits
) -> StreamedConfig | None:
    """Return the layout for a gated weight: both halves in one tile where all programs run at once, or a tile each.

    Weights up to `MIDDLE_WEIGHT_BYTES` have one tile, too. All of a small weight is requested at once. Where each
    multiprocessor has one program at most, its tiles leave no room for a second one, since two on one multiprocessor
    would leave another idle (a quarter of Llama-8B: 51.8 and 46.5 us a layer at one row, H200).
    """
    if num_rows > (MAX_GATED_ROWS if weight_bytes > MIDDLE_WEIGHT_BYTES else MAX_ROWS):
        return None
    block_m = padded_rows(num_rows)
    if num_rows <= MAX_ROWS and (weight_bytes <= MIDDLE_WEIGHT_BYTES or _is_joined(num_columns, gpu)):
        if weight_bytes <= SMALL_WEIGHT_BYTES:
            block_k, num_stages = _tiles(size, 5)
        elif num_columns <= JOINED_COLUMNS * gpu.num_sms:
            block_k, num_stages = _long_tiles(size, 4)
        else:
            block_k, num_stages = _tiles(size, 3)
        return StreamedConfig(
            block_m=block_m, block_n=64, num_columns=JOINED_COLUMNS, is_joined=True, block_k=block_k,
            num_stages=num_stages,
        )  # fmt: skip
    if num_rows > MAX_ROWS:
        return StreamedConfig(block_m=64, block_n=128, num_columns=128, block_k=128, num_stages=3, num_warps=8)
    if num_rows <= FEW_ROWS and 8 * gpu.num_sms <= num_columns // 128 * 10 <= 10 * gpu.num_sms:
        return StreamedConfig(block_m=8, block_n=128, num_columns=128, block_k=128, num_stages=3)
    return StreamedConfig(block_m=block_m, block_n=64, num_columns=64, block_k=128, num_stages=3)


def _plain_config(
    num_rows: int, num_columns: int, size: int, weight_bytes: int, gpu: GpuLimits
) -> StreamedConfig | None:
    """Return a layout of one wave of programs that is as full as possible, or None."""
    if num_rows > (SHORT_ROWS if weight_bytes <= SMALL_WEIGHT_BYTES else MAX_ROWS):
        return None
    columns = next((each for each in (24, 32, 48, 64) if -(-num_columns // each) <= gpu.num_sms), None)
    if columns is None or -(-num_columns // columns) < WIDE_FILL * gpu.num_sms:
        return None
    is_long = size >= LONG_ROW and num_rows <= SHORT_ROWS
    block_k, num_stages = _long_tiles(size, 4) if is_long else _tiles(size, 4)
    if weight_bytes > MIDDLE_WEIGHT_BYTES and block_k < LONG_TILE:
        return None  # the library reads it just as fast
    return StreamedConfig(
        block_m=padded_rows(num_rows), block_n=64, num_columns=columns, block_k=block_k, num_stages=num_stages
    )


@lru_cache(maxsize=4096)
def streamed_parts_config(
    num_rows: int, num_columns: int, size: int, *, itemsize: int, gpu: GpuLimits
) -> StreamedConfig | None:
    """Return the layout for `[num_rows, size] @ [num_columns, size].T` in parts that a norm adds, or None.

    None means that one part, or other parts (`split_linear_config.py`), are at least as fast.
    """
    weight_bytes = num_columns * size * itemsize
    if itemsize != 2 or not gpu.can_overlap or not 1 <= num_rows <= MAX_ROWS or num_columns % 64:
        return None
    if weight_bytes > MIDDLE_WEIGHT_BYTES:
        block_k, num_stages, programs = 256, 3, 2 * gpu.num_sms
    elif num_rows == 1:
        return None
    elif weight_bytes > SMALL_WEIGHT_BYTES:
        block_k, num_stages, programs = 128, 6, 2 * gpu.num_sms
    elif num_rows > SHORT_ROWS:
        block_k, num_stages, programs = 128, 8, gpu.num_sms
    elif size >= LONG_SIZE:
        block_k, num_stages, programs = 256, 4, gpu.num_sms
    else:
        return None
    tiles = size // block_k
    for parts in range(min(programs // (num_columns // 64), tiles // MIN_TILES), 1, -1):
        if tiles % parts == 0:
            config = StreamedConfig(
                block_m=padded_rows(num_rows), block_n=64, num_columns=64, block_k=block_k, num_stages=num_stages,
                num_parts=parts,
            )  # fmt: skip
            return config if _fits(config, num_columns, size, gpu, is_gated=False) else None
    return None


def _tiles(size: int, num_stages: int) -> tuple[int, int]:
    """Return the numbers of a row in a tile and the stages: 256 if that divides a row, else 128 in twice as many."""
    return (256, num_stages) if size % 256 == 0 else (128, 2 * num_stages)


def _long_tiles(size: int, num_stages: int) -> tuple[int, int]:
    """Return the numbers of a row in a tile and the stages: `LONG_TILE` if that divides a row, else as `_tiles`."""
    return (LONG_TILE, 3) if size % LONG_TILE == 0 else _tiles(size, num_stages)


def _is_joined(num_columns: int, gpu: GpuLimits) -> bool:
    """Return whether all programs of a gated weight with both halves in one tile run at once, two a multiprocessor."""
    return -(-num_columns // JOINED_COLUMNS) <= 2 * gpu.num_sms


def padded_rows(num_rows: int) -> int:
    """Return the rows of a program: the next power of two, but at least 16.

    Triton 3.6 computes products of eight rows with the instructions of older GPUs.
    """
    return max(16, 1 << (num_rows - 1).bit_length())


def _fits(config: StreamedConfig, num_columns: int, size: int, gpu: GpuLimits, *, is_gated: bool) -> bool:
    """Return whether tiles are whole, programs fill their waves, and shared memory has room for what is on its way."""
    if size % config.block_k or size < MIN_TILES * config.block_k or num_columns % 16:
        return False
    tile_bytes = config.block_n * config.block_k * 2 * (2 if is_gated and not config.is_joined else 1)
    shared_bytes = config.num_stages * tile_bytes + config.block_m * config.block_k * 2
    if shared_bytes > gpu.shared_bytes:
        return False
    programs = -(-num_columns // config.num_columns) * config.num_parts
    room = gpu.num_sms * (gpu.shared_bytes // shared_bytes)  # of a wave
    waves = -(-programs // room)
    return programs >= MIN_FILL * gpu.num_sms and (waves == 1 or programs >= LAST_FILL * waves * room)
