"""The linears whose sums are split over programs."""

from __future__ import annotations

import pytest

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.passes.kernels.linear.linear_config import SLICED_ROWS
from piecegraph.passes.kernels.linear.split_linear_config import (
    BLOCK_K,
    BLOCK_M,
    MAX_ROWS,
    MIN_TILES,
    SplitConfig,
    split_config,
)
from tests.gpus import H200, RTX_4090


def config(num_rows: int, num_columns: int, size: int, itemsize: int = 2, gpu: GpuLimits = H200) -> SplitConfig | None:
    return split_config(num_rows, num_columns, size, itemsize=itemsize, gpu=gpu)


@pytest.mark.parametrize("size", [2048, 3072])
def test_projections_of_qwen3_are_split_for_dozens_of_rows(size: int) -> None:
    ours = [rows for rows in range(1, 513) if config(rows, 1024, size) is not None]
    assert ours == list(range(SLICED_ROWS + 1, MAX_ROWS + 1))


@pytest.mark.parametrize("gpu", [H200, RTX_4090])
@pytest.mark.parametrize("num_rows", [17, 32, 64, 65, 128, 129, 256])
@pytest.mark.parametrize(("num_columns", "size"), [(64, 512), (1024, 2048), (1024, 3072), (2048, 2048), (896, 4864)])
def test_parts_cover_a_row_and_fit_the_gpu(num_rows: int, num_columns: int, size: int, gpu: GpuLimits) -> None:
    found = config(num_rows, num_columns, size, gpu=gpu)
    if found is None:  # two parts, of the widest columns, would take more than one program on each multiprocessor
        programs = -(-num_rows // BLOCK_M) * (num_columns // 64)
        has_two_parts = size // BLOCK_K >= 2 * MIN_TILES
        assert 2 * programs > gpu.num_sms or not has_two_parts
        return
    assert found.num_parts * found.num_tiles * found.block_k == size and found.num_parts >= 2
    assert num_columns % found.block_n == 0
    assert -(-num_rows // found.block_m) * (num_columns // found.block_n) * found.num_parts <= gpu.num_sms
    assert found.num_stages * (found.block_m + found.block_n) * found.block_k * 2 <= gpu.shared_bytes


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "itemsize"),
    [
        (32, 1024, 2048, 4),
        (32, 1024, 2000, 2),
        (32, 1000, 2048, 2),
        (32, 4096, 4096, 2),  # streamed
        (65, 4096, 4096, 2),
        (64, 8192, 14336, 2),  # 224 MiB
        (64, 2560, 9728, 2),  # down of Qwen3-4B: two parts are 80 programs, and its tiles do not make three
        (64, 6144, 4096, 2),  # enough programs with one part each
        (32, 1024, 512 - 128, 2),
        (64, 0, 4096, 2),
    ],
)
def test_shapes_that_are_not_split(num_rows: int, num_columns: int, size: int, itemsize: int) -> None:
    """Other types, sizes of no whole tiles, many rows or few of large weights, few tiles, no columns."""
    assert config(num_rows, num_columns, size, itemsize) is None


@pytest.mark.parametrize(
    ("num_columns", "size", "num_parts"),
    [(4096, 4096, 2), (4096, 14336, 2), (2048, 8192, 4)],  # output and down of Llama-8B, down of Llama-1B
)
def test_dozens_of_rows_of_large_weights_are_one_wave(num_columns: int, size: int, num_parts: int) -> None:
    """Each program has all rows and most of a multiprocessor's shared memory, and prefetches four tiles."""
    for num_rows in (33, 64):
        found = config(num_rows, num_columns, size)
        assert found is not None and found.num_parts == num_parts
        assert (found.block_m, found.block_n, found.num_warps, found.num_stages) == (64, 64, 4, 6)
        assert found.num_ahead == 4 <= found.num_tiles and found.num_tiles * num_parts * found.block_k == size
        assert 0.7 * H200.num_sms <= num_columns // found.block_n * num_parts <= H200.num_sms
        assert config(num_rows, num_columns, size, gpu=RTX_4090) is None
