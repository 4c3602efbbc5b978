"""The linears that are streamed, whole and in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph.passes.kernels.common.gpu_limits import MIDDLE_WEIGHT_BYTES, SMALL_WEIGHT_BYTES
from piecegraph.passes.kernels.linear.streamed_config import (
    LONGEST_NORMED,
    MAX_GATED_ROWS,
    MAX_ROWS,
    MIN_FILL,
    MIN_TILES,
    SHORT_ROWS,
    StreamedConfig,
    streamed_config,
    streamed_parts_config,
)
from tests.gpus import H200, RTX_4090

GATED = [(3072, 1024), (4864, 896), (6144, 2048), (14336, 4096), (9728, 2560), (7168, 4096), (3584, 4096)]
"""Columns and size of gate and up: Qwen3-0.6B, Qwen2-0.5B, Qwen3-1.7B, Llama-8B, Qwen3-4B, and two and four ranks of
Llama-8B."""

WHOLE = [(4096, 1024, SHORT_ROWS), (6144, 4096, MAX_ROWS), (4608, 3584, MAX_ROWS), (1024, 2048, 0), (1152, 896, 0)]
WHOLE += [(5120, 8192, SHORT_ROWS), (8192, 14336, SHORT_ROWS)]
"""Columns and size of projections that no norm follows, and up to how many rows they are streamed."""

PLAIN = [(1024, 3072), (1024, 2048), (4096, 4096), (4096, 14336), (3584, 18944), (896, 4864)]


def shared_bytes(config: StreamedConfig, halves: int) -> int:
    return (config.num_stages * config.block_n * halves + config.block_m) * config.block_k * 2


@pytest.mark.parametrize(("num_columns", "size"), GATED)
def test_gated_linears(num_columns: int, size: int) -> None:
    """From two rows on, small ones as large ones; more rows of large ones.

    Both halves are in one tile where all programs run at once, and one row is streamed there, too, if it is not small.
    """
    found = {
        rows: streamed_config(rows, num_columns, size, is_gated=True, itemsize=2, gpu=H200) for rows in range(1, 130)
    }
    is_large = 4 * num_columns * size > MIDDLE_WEIGHT_BYTES
    is_joined = -(-num_columns // 32) <= 2 * H200.num_sms
    taken = [rows for rows, config in found.items() if config is not None]
    is_first = is_joined and 4 * num_columns * size > SMALL_WEIGHT_BYTES
    fits_tall = is_large and num_columns // 128 >= MIN_FILL * H200.num_sms
    assert taken == list(range(1 if is_first else 2, (MAX_GATED_ROWS if fits_tall else MAX_ROWS) + 1))
    for rows in taken:
        config = found[rows]
        assert config is not None and rows <= config.block_m and config.num_parts == 1
        assert config.num_columns == config.block_n // (2 if config.is_joined else 1)
        assert config.is_joined == (is_joined and rows <= MAX_ROWS)
        if is_first and config.is_joined:  # tiles leave room for a second program only if there is one
            is_alone = 2 * shared_bytes(config, 1) > H200.shared_bytes
            assert is_alone == (-(-num_columns // 32) <= H200.num_sms)
        assert config.block_n >= 16 * config.num_warps and size % config.block_k == 0
        assert shared_bytes(config, 1 if config.is_joined else 2) <= H200.shared_bytes


@pytest.mark.parametrize(("num_columns", "size", "up_to"), WHOLE)
def test_whole_sums_fill_one_wave(num_columns: int, size: int, up_to: int) -> None:
    """So few columns a program that no multiprocessor has two, and most have one; long rows have long tiles."""
    for rows in range(1, 100):
        config = streamed_config(rows, num_columns, size, is_gated=False, itemsize=2, gpu=H200)
        assert (config is not None) == ((1 if size > LONGEST_NORMED else 2) <= rows <= up_to)
        if config is not None:
            programs = -(-num_columns // config.num_columns)
            assert 0.7 * H200.num_sms <= programs <= H200.num_sms and config.num_columns <= config.block_n
            assert size % config.block_k == 0 and shared_bytes(config, 1) <= H200.shared_bytes
            assert (config.block_k == 512) == (rows <= SHORT_ROWS and size >= 3584)


@pytest.mark.parametrize(("num_columns", "size"), PLAIN)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 17, 32, 33])
def test_parts_cover_a_row(num_columns: int, size: int, num_rows: int) -> None:
    """Whole tiles, none of them empty, and at most two programs on each multiprocessor."""
    config = streamed_parts_config(num_rows, num_columns, size, itemsize=2, gpu=H200)
    if config is None:
        is_short = num_rows <= 16 and size < 3072
        is_alone = num_rows == 1 and num_columns * size * 2 <= 64 * 2**20
        few_programs = num_columns == 896
        assert num_rows > MAX_ROWS or is_short or is_alone or few_programs
        return
    assert config.num_parts > 1 and (size // config.block_k) % config.num_parts == 0
    assert size // config.block_k // config.num_parts >= MIN_TILES and size % config.block_k == 0
    assert num_columns // config.block_n * config.num_parts <= 2 * H200.num_sms
    assert num_rows <= config.block_m and shared_bytes(config, 1) <= H200.shared_bytes


@pytest.mark.parametrize(("num_columns", "size"), [(18944, 3584), (17408, 5120)])
@pytest.mark.parametrize("num_rows", [2, 8, 16, 32, 64])
def test_a_last_wave_of_a_few_programs_is_not_taken(num_columns: int, size: int, num_rows: int) -> None:
    """Gate and up of Qwen2-7B and Qwen3-14B: the library's."""
    assert streamed_config(num_rows, num_columns, size, is_gated=True, itemsize=2, gpu=H200) is None


def test_one_row_behind_no_norm_is_streamed_if_the_weight_is_large() -> None:
    """The down projection of a half of Llama-8B, not its output projection: behind attention that takes longer."""
    down = streamed_config(1, 4096, 7168, is_gated=False, itemsize=2, gpu=H200)
    assert down is not None and down == streamed_config(2, 4096, 7168, is_gated=False, itemsize=2, gpu=H200)
    assert streamed_config(1, 4096, 4096, is_gated=False, itemsize=2, gpu=H200) is None
    assert streamed_config(1, 4096, 4096, is_gated=False, itemsize=2, gpu=H200, is_normed=True) is not None


def test_shapes_that_are_not_streamed() -> None:
    """The head; other types, GPUs whose kernels do not overlap, columns and sizes of no whole tiles, little memory."""
    assert streamed_config(4, 128256, 4096, is_gated=False, itemsize=2, gpu=H200) is None
    small = replace(H200, shared_bytes=99 * 2**10)
    for num_columns, size, itemsize, gpu in (
        (14336, 4096, 4, H200), (14336, 4096, 2, RTX_4090), (14336, 4100, 2, H200), (14336, 4096, 2, small),
    ):  # fmt: skip
        assert streamed_config(4, num_columns, size, is_gated=True, itemsize=itemsize, gpu=gpu) is None
        assert streamed_parts_config(4, num_columns, size, itemsize=itemsize, gpu=gpu) is None
    assert streamed_parts_config(4, 4100, 14336, itemsize=2, gpu=H200) is None
