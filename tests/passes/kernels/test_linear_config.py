"""Which linears take a kernel of ours."""

from __future__ import annotations

import pytest

from piecegraph.passes.kernels.linear_config import BLOCK_M, LinearConfig, linear_config

H200_SMS = 132


def config(
    num_rows: int, num_columns: int, size: int, *, is_gated: bool = False, itemsize: int = 2
) -> LinearConfig | None:
    return linear_config(num_rows, num_columns, size, is_gated=is_gated, itemsize=itemsize, num_sms=H200_SMS)


@pytest.mark.parametrize(
    ("num_columns", "size", "is_gated", "up_to"),
    [
        (4096, 1024, False, 64),  # query, key and value of Qwen3-0.6B
        (1024, 2048, False, 128),  # its output projection: half the programs, so twice the rows in one wave
        (3072, 1024, True, 64),
        (1024, 3072, False, 128),
        (4096, 4096, False, 2),  # Llama-8B's output projection: 32 MiB
        (6144, 4096, False, 0),
        (151936, 1024, False, 0),
    ],
)
def test_few_rows_of_small_weights_are_ours(num_columns: int, size: int, is_gated: bool, up_to: int) -> None:
    """And many rows the library's, which reads a weight once for all of them."""
    ours = [rows for rows in range(1, 513) if config(rows, num_columns, size, is_gated=is_gated) is not None]
    assert ours == list(range(1, up_to + 1))


def test_one_and_two_rows_need_no_tensor_cores() -> None:
    for rows, block_m in ((1, 0), (2, 0), (3, BLOCK_M)):
        found = config(rows, 1024, 2048)
        assert found is not None and found.block_m == block_m


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "itemsize"),
    [(1, 1024, 100, 2), (1, 1001, 1024, 2), (1, 1024, 1024, 4), (0, 1024, 1024, 2)],
)
def test_what_the_kernels_do_not_take(num_rows: int, num_columns: int, size: int, itemsize: int) -> None:
    assert config(num_rows, num_columns, size, itemsize=itemsize) is None
