"""Shrink and expand equal the product of the matrices, in Triton's interpreter, and compile for sm_90."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.lora import shrink_expand as kernels
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted

NUM_SLOTS, MAX_RANK, SIZE, COLUMNS = 3, 8, 70, 40
RANKS = torch.tensor([8, 0, 3], dtype=torch.int32)
SLOTS = torch.tensor([0, -1, 2, 2, 0, 1, -1] * 3, dtype=torch.int32)


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, A, B and y; what lies behind a slot's rank is no number, since nothing may read it."""
    torch.manual_seed(0)
    x, y = torch.randn(len(SLOTS), SIZE), torch.randn(len(SLOTS), 2 * COLUMNS)[:, :COLUMNS]
    a, b = torch.randn(NUM_SLOTS, MAX_RANK, SIZE), torch.randn(NUM_SLOTS, COLUMNS, MAX_RANK)
    for slot, rank in enumerate(RANKS.tolist()):
        a[slot, rank:] = b[slot, :, rank:] = float("nan")
    return x, a, b, y


def wanted() -> torch.Tensor:
    x, a, b, y = matrices()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0 and (rank := int(RANKS[slot])):
            y[row] += b[slot, :, :rank] @ (a[slot, :rank] @ x[row])
    return y


def shrink_and_expand() -> None:
    x, a, b, y = matrices()
    shrunk = torch.full((len(SLOTS), MAX_RANK), float("nan"))
    kernels.shrink_on_gpu(x, a, RANKS, SLOTS, shrunk)
    kernels.expand_on_gpu(y, shrunk, b, RANKS, SLOTS)
    torch.testing.assert_close(y, wanted(), rtol=1e-5, atol=1e-4)


def test_shrink_and_expand_equal_the_product_of_the_matrices() -> None:
    """In any mix of adapters, some of which do not change the module, and of rows without one."""
    interpreted(shrink_and_expand)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [16, 64])
def test_they_compile_for_hopper(dtype: torch.dtype, rows: int) -> None:
    floats, numbers = torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.int32)
    common = {"NUM_SLOTS": 8, "ROWS": rows, "RANK": 16}
    shrink = {
        "x": floats, "x_stride": 1024, "a": floats, "ranks": numbers, "slots": numbers, "out": torch.empty(0),
        "num_rows": rows, "size": 1024, "max_rank": 16, **common, "BLOCK": kernels.BLOCK_SIZE, "PRECISION": "ieee",
    }  # fmt: skip
    expand = {
        "y": floats, "y_stride": 3072, "shrunk": torch.empty(0), "b": floats, "ranks": numbers, "slots": numbers,
        "num_rows": rows, "num_columns": 1024, "max_rank": 16, **common, "BLOCK": kernels.BLOCK_COLUMNS,
    }  # fmt: skip
    assert ("mma" in compile_for_gpu(kernels._shrink, shrink, {})) == (dtype is torch.bfloat16)
    assert "st.global" in compile_for_gpu(kernels._expand, expand, {})
