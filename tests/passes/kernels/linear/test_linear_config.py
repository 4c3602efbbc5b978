"""The linears that take a kernel of ours, and its layout."""

from __future__ import annotations

import pytest

from piecegraph.passes.kernels.common.gpu_limits import SMALL_WEIGHT_BYTES, GpuLimits
from piecegraph.passes.kernels.linear.linear_config import (
    BLOCK_M,
    HELD_REGISTERS,
    SLICED_ROWS,
    Config,
    LinearConfig,
    SlicedConfig,
    linear_config,
    norm_linear_config,
)
from piecegraph.passes.kernels.linear.streamed_config import LONGEST_NORMED, StreamedConfig
from tests.gpus import H200, RTX_4090


def config(
    num_rows: int, num_columns: int, size: int, *, is_gated: bool = False, itemsize: int = 2, gpu: GpuLimits = H200
) -> Config | None:
    return linear_config(num_rows, num_columns, size, is_gated=is_gated, itemsize=itemsize, gpu=gpu)


@pytest.mark.parametrize(
    ("num_columns", "size", "is_gated", "up_to"),
    [
        (4096, 1024, False, 256),  # query, key and value of Qwen3-0.6B
        (1024, 2048, False, 128),  # its output projection: half the programs, so twice the rows in one wave
        (3072, 1024, True, 256),  # gate and up: the library's activation is a kernel more
        (1024, 3072, False, 128),
        (4096, 4096, False, 32),  # Llama-8B's output projection, which takes parts from 33 rows on: 32 MiB
        (6144, 4096, False, 64),
        (14336, 4096, True, 128),  # gate and up of Llama-8B
        (12288, 4096, True, 64),  # of Qwen3-8B: too few programs for more rows
        (8192, 2048, True, 32),  # of Llama-1B
        (151936, 1024, False, 1),
    ],
)
def test_few_rows_of_small_weights_are_ours(num_columns: int, size: int, is_gated: bool, up_to: int) -> None:
    """And one of large ones; many rows are the library's, which reads a weight once for all of them."""
    ours = [rows for rows in range(1, 513) if config(rows, num_columns, size, is_gated=is_gated) is not None]
    assert ours == list(range(1, up_to + 1))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", [192, 1024, 2048, 3072, 4096, 6144, 14336])
@pytest.mark.parametrize("num_columns", [16, 1024, 4096, 65536])
def test_a_program_of_one_row_holds_its_tile_in_registers(num_columns: int, size: int, is_gated: bool) -> None:
    """Two numbers each, at most half of a thread's, with a preceding norm and without."""
    halves = 2 if is_gated else 1
    plain = config(1, num_columns, size, is_gated=is_gated)
    normed = norm_linear_config(size, 2 * halves * num_columns * size, is_gated=is_gated)
    if normed is None:
        assert size > LONGEST_NORMED or (num_columns == 65536 and not is_gated), "a long row, or a head"
    if isinstance(plain, StreamedConfig):
        assert halves * num_columns * size * 2 > SMALL_WEIGHT_BYTES
        assert num_columns <= 64 * H200.num_sms or (size > LONGEST_NORMED and is_gated)
    else:
        assert isinstance(plain, LinearConfig)
    for found in (each for each in (plain, normed) if isinstance(each, LinearConfig)):
        assert found.block_m == 0
        assert halves * found.block_n * found.block_k // (32 * found.num_warps) <= 128


def test_a_program_of_one_row_has_fewer_columns_where_a_small_weight_makes_programs_enough() -> None:
    """Up to 8 MiB, 2,048 columns of 2,048 numbers, a program has four columns."""
    layouts = [config(1, num_columns, 2048, is_gated=False) for num_columns in (1024, 2048, 2064, 4096)]
    assert [layout.block_n for layout in layouts if isinstance(layout, LinearConfig)] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("num_columns", "size", "is_gated", "is_apart"),
    [
        (151936, 1024, False, True),  # the head of Qwen3-0.6B
        (128256, 4096, False, True),  # of Llama-8B
        (4096, 1024, False, False),  # query, key and value
        (7168, 5120, False, False),  # of Qwen3-14B
        (14336, 4096, True, False),  # gate and up
        (5120, 8192, False, True),  # query, key and value of a rank of Llama-70B
        (14336, 8192, True, True),  # its gate and up
    ],
)
def test_which_linears_of_one_row_have_a_separate_norm(
    num_columns: int, size: int, is_gated: bool, is_apart: bool
) -> None:
    weight_bytes = 2 * (2 if is_gated else 1) * num_columns * size
    assert (norm_linear_config(size, weight_bytes, is_gated=is_gated) is None) == is_apart


@pytest.mark.parametrize(
    ("num_columns", "size", "is_gated", "is_streamed"),
    [
        (6144, 4096, False, True),  # query, key and value of Llama-8B
        (4096, 1024, False, False),  # of Qwen3-0.6B: small
        (7168, 5120, False, False),  # of Qwen3-14B: too large for one wave
        (5120, 8192, False, True),  # of a rank of Llama-70B
        (14336, 4096, True, False),  # gate and up: normed by each program
        (7168, 4096, True, True),  # of a rank of Llama-8B, behind a norm of its own: all programs run at once
        (14336, 8192, True, True),  # of a rank of Llama-70B: too long for a norm by each program
        (3072, 1024, True, False),  # of Qwen3-0.6B: small
    ],
)
def test_one_row_is_streamed_behind_a_norm(num_columns: int, size: int, is_gated: bool, is_streamed: bool) -> None:
    """With two rows' layout, and a GPU on which kernels overlap; without a norm ahead a gated weight or a large one."""
    found = linear_config(1, num_columns, size, is_gated=is_gated, itemsize=2, gpu=H200, is_normed=True)
    assert isinstance(found, StreamedConfig) == is_streamed
    if is_streamed:
        assert found == config(2, num_columns, size, is_gated=is_gated)
    plain = config(1, num_columns, size, is_gated=is_gated)
    is_alike = is_gated or size > LONGEST_NORMED
    assert found == plain if is_alike else isinstance(plain, LinearConfig) and (is_streamed or found == plain)
    older = linear_config(1, num_columns, size, is_gated=is_gated, itemsize=2, gpu=RTX_4090, is_normed=True)
    assert isinstance(older, LinearConfig)


def test_many_rows_take_taller_blocks() -> None:
    """In one wave of programs, where half as many rows a program would be two. Of gated ones two programs share a
    multiprocessor up to 128 rows; then they do in any case."""
    for rows, size, layout, at_once in (
        (64, 1024, (64, 32, 128), 1),
        (128, 1024, (64, 32, 128), 2),
        (128, 1088, (128, 32, 64), 1),
        (256, 1024, (128, 64, 64), 1),
    ):
        found = config(rows, 3072, size, is_gated=True)
        assert isinstance(found, LinearConfig)
        assert (found.block_m, found.block_n, found.block_k) == layout
        assert -(-rows // found.block_m) * -(-3072 // found.block_n) <= at_once * H200.num_sms
        shared = (found.block_m + 2 * found.block_n) * found.block_k * 2 * found.num_stages
        assert at_once * shared <= H200.shared_bytes
    assert config(257, 3072, 1024, is_gated=True) is None
    for rows, layout in ((64, (64, 32, 128)), (128, (128, 32, 64)), (256, (128, 64, 64))):
        found = config(rows, 4096, 1024)
        assert isinstance(found, LinearConfig) and (found.block_m, found.block_n, found.block_k) == layout
    assert config(128, 9216, 1024, is_gated=True) is None  # two waves


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "is_gated", "layout"),
    [
        (33, 6144, 4096, False, (64, 64, 128, 4, 6)),
        (64, 6144, 4096, False, (64, 64, 128, 4, 6)),
        (64, 6160, 4096, False, (64, 64, 128, 4, 6)),  # a last program of 16 columns
        (64, 6144, 2560, False, (64, 64, 128, 4, 6)),  # query, key and value of Qwen3-4B
        (65, 14336, 4096, True, (128, 128, 64, 8, 4)),  # gate and up of Llama-8B
        (128, 14336, 8192, True, (128, 128, 64, 8, 4)),  # of one of two ranks of Llama-70B
    ],
)
def test_dozens_of_rows_of_large_weights_are_one_wave(
    num_rows: int, num_columns: int, size: int, is_gated: bool, layout: tuple[int, int, int, int, int]
) -> None:
    """Each program has all rows and most of a multiprocessor's shared memory, and prefetches four tiles."""
    found = config(num_rows, num_columns, size, is_gated=is_gated)
    assert isinstance(found, LinearConfig)
    assert (found.block_m, found.block_n, found.block_k, found.num_warps, found.num_stages) == layout
    assert found.num_ahead == 4 and 4 * found.block_k <= size
    tile_bytes = (found.block_m + found.block_n * (2 if is_gated else 1)) * found.block_k * 2
    assert H200.shared_bytes // 2 < found.num_stages * tile_bytes <= H200.shared_bytes
    assert 0.7 * H200.num_sms <= -(-num_columns // found.block_n) <= H200.num_sms
    for gpu in (RTX_4090, GpuLimits(num_sms=132, shared_bytes=160 * 2**10, can_overlap=True)):
        assert config(num_rows, num_columns, size, is_gated=is_gated, gpu=gpu) is None


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "is_gated"),
    [
        (65, 6144, 4096, False),
        (64, 5120, 8192, False),  # a rank of Llama-70B: 80 programs
        (64, 8192, 14336, False),  # its down projection: 224 MiB
        (129, 14336, 4096, True),
        (128, 7168, 8192, True),  # gate and up of one of four: 56 programs
        (128, 17408, 5120, True),  # of Qwen3-14B: more than one wave
        (64, 6144, 4160, False),  # no whole tiles
    ],
)
def test_what_the_library_keeps(num_rows: int, num_columns: int, size: int, is_gated: bool) -> None:
    assert config(num_rows, num_columns, size, is_gated=is_gated) is None


def test_which_kernel_depends_on_the_rows() -> None:
    """Ordinary cores, then tensor cores with all rows in a program, then blocks of rows."""
    for rows, block_m in ((1, 0), (2, SLICED_ROWS), (SLICED_ROWS, SLICED_ROWS), (SLICED_ROWS + 1, BLOCK_M)):
        found = config(rows, 1024, 2048)
        assert isinstance(found, LinearConfig | SlicedConfig) and found.block_m == block_m
        assert isinstance(found, SlicedConfig) == (block_m == SLICED_ROWS)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", [256, 768, 1024, 1536, 2048, 3072, 8192])
@pytest.mark.parametrize("num_columns", [16, 512, 1024, 2048, 3072, 4096])
def test_a_sliced_layout_covers_the_weight(num_columns: int, size: int, is_gated: bool) -> None:
    found = config(9, num_columns, size, is_gated=is_gated)
    if isinstance(found, StreamedConfig):
        assert (is_gated and num_columns >= 3072) or num_columns >= 2048
        return
    if not isinstance(found, SlicedConfig):
        assert num_columns * size * (4 if is_gated else 2) > 16 * 2**20
        return
    assert found.num_tiles * found.num_slices * found.block_k == size
    assert 1 <= found.num_held <= min(3, found.num_tiles)
    registers = found.num_held * found.block_n * (2 if is_gated else 1) * found.block_k // 64
    assert registers <= HELD_REGISTERS


def test_a_size_of_no_whole_tiles_takes_blocks_of_rows() -> None:
    for rows, block_m in ((2, 0), (8, BLOCK_M)):
        found = config(rows, 1536, 576)
        assert isinstance(found, LinearConfig) and found.block_m == block_m


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "itemsize"),
    [(1, 1024, 100, 2), (1, 1001, 1024, 2), (1, 1024, 1024, 4), (0, 1024, 1024, 2)],
)
def test_shapes_that_the_kernels_do_not_take(num_rows: int, num_columns: int, size: int, itemsize: int) -> None:
    assert config(num_rows, num_columns, size, itemsize=itemsize) is None


def test_a_gpu_with_less_shared_memory_has_fewer_tiles_in_flight() -> None:
    """Where not even two tiles fit, the library runs."""
    stages = []
    for gpu in (H200, RTX_4090):
        found = config(32, 1024, 2048, gpu=gpu)
        assert isinstance(found, LinearConfig)
        assert found.num_stages * (found.block_m + found.block_n) * found.block_k * 2 <= gpu.shared_bytes
        stages.append(found.num_stages)
    assert stages[0] > stages[1] >= 2
    assert isinstance(config(8, 1024, 3072, gpu=RTX_4090), SlicedConfig)
    small = GpuLimits(num_sms=40, shared_bytes=32 * 2**10)
    assert config(8, 512, 1024, gpu=small) is None and config(1, 512, 1024, gpu=small) is not None
