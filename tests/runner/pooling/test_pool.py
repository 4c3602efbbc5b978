"""Every kind of pooling, against the same over one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecegraph.runner.pooling.pool import PoolingType, pool

LENS = (3, 1, 7)
REFERENCE: dict[PoolingType, Callable[[torch.Tensor], torch.Tensor]] = {
    PoolingType.CLS: lambda rows: rows[0],
    PoolingType.LAST: lambda rows: rows[-1],
    PoolingType.MEAN: lambda rows: rows.mean(0),
    PoolingType.MAX: lambda rows: rows.max(0).values,
    PoolingType.MEAN_SQRT_LEN: lambda rows: rows.sum(0) / len(rows) ** 0.5,
    PoolingType.WEIGHTED_MEAN: lambda rows: torch.arange(1.0, len(rows) + 1) @ rows / sum(range(1, len(rows) + 1)),
}


@pytest.mark.parametrize("kind", PoolingType)
def test_rows_are_those_of_each_sequence_alone(kind: PoolingType) -> None:
    """Rows of padding and empty sequences at the end change nothing."""
    hidden = torch.randn(sum(LENS) + 2, 8, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 3, 4, 11, 11], dtype=torch.int32)
    rows = pool(hidden, bounds, [kind])
    wanted = torch.stack([REFERENCE[kind](each) for each in hidden[:11].split(LENS)])
    assert rows.shape == (4, 8)
    torch.testing.assert_close(rows[:3], wanted)


def test_several_kinds_are_concatenated_in_float32() -> None:
    hidden = torch.randn(4, 8, dtype=torch.bfloat16)
    rows = pool(hidden, torch.tensor([0, 4]), [PoolingType.MEAN, PoolingType.CLS])
    assert (rows.shape, rows.dtype) == ((1, 16), torch.float32)
    torch.testing.assert_close(rows[0, 8:], hidden[0].float())
    torch.testing.assert_close(rows[0, :8], hidden.float().mean(0))
