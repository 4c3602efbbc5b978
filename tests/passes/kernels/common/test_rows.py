"""Kernels find the rows of a tensor wherever they lie."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.common.rows import Rows, evenly_spaced_rows_of, rows_of

TOKENS = 5
PROJECTION = torch.arange(TOKENS * 64.0).reshape(1, TOKENS, 64)  # of 2 heads of 16 and others


def gathered(rows: Rows, size: int) -> torch.Tensor:
    """[num_rows, size], as a kernel reads them."""
    base = torch.as_strided(rows.tensor, (1,), (1,))
    starts = [
        (r // rows.inner) * rows.outer_stride + (r % rows.inner) * rows.inner_stride for r in range(rows.num_rows)
    ]
    first = base.storage_offset()
    return torch.stack([torch.as_strided(rows.tensor, (size,), (1,), first + start) for start in starts])


@pytest.mark.parametrize(
    "x",
    [
        PROJECTION,
        PROJECTION[0, 0],
        PROJECTION[..., 8:40],
        PROJECTION[..., 16:48].unflatten(-1, (2, 16)),
        PROJECTION[..., 16:48].unflatten(-1, (2, 16)).transpose(1, 2),
        PROJECTION[:, :1, 16:48].unflatten(-1, (2, 16)),
    ],
    ids=["contiguous", "one row", "columns", "heads of columns", "heads first", "heads of one token"],
)
def test_rows_are_found_without_a_copy(x: torch.Tensor) -> None:
    rows = rows_of(x)
    assert rows.tensor.data_ptr() == x.data_ptr()
    assert torch.equal(gathered(rows, x.shape[-1]), x.reshape(-1, x.shape[-1]))


@pytest.mark.parametrize(
    "x",
    [PROJECTION.transpose(1, 2), torch.arange(256.0).reshape(4, 4, 4, 4)[:, :3, ::3, :2]],
    ids=["last dim with gaps", "three strides"],
)
def test_tensors_without_regular_strides_are_copied(x: torch.Tensor) -> None:
    rows = rows_of(x)
    assert rows.tensor.data_ptr() != x.data_ptr()
    assert torch.equal(gathered(rows, x.shape[-1]), x.reshape(-1, x.shape[-1]))


def test_one_stride_is_enough_for_tokens_but_not_for_heads() -> None:
    heads = PROJECTION[..., 16:48].unflatten(-1, (2, 16))
    assert evenly_spaced_rows_of(PROJECTION[..., :8]).tensor.data_ptr() == PROJECTION.data_ptr()
    copied = evenly_spaced_rows_of(heads)
    assert copied.inner == 1
    assert torch.equal(gathered(copied, 16), heads.reshape(-1, 16))


def test_a_tensor_without_rows_has_none() -> None:
    assert rows_of(torch.empty(1, 0, 8)).num_rows == 0
    assert rows_of(torch.empty(1, 0, 64)[..., :8]).num_rows == 0
