"""Norms whose result is rounded have the bits of the separate ops."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.collectives import ALL_REDUCE
from piecegraph.passes.ops.quantised.rounded_norms import (
    ADD_RMS_NORM_ROUNDED,
    ALL_REDUCE_ADD_RMS_NORM_ROUNDED,
    RMS_NORM_ROUNDED,
)
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from tests.runner.tensor_parallel.ranks_in_threads import ThreadGroup, run_ranks

EPS = 1e-5
ROUNDINGS = [(WHOLE_TOKEN, torch.int8), (WHOLE_TOKEN, torch.float8_e4m3fn), (32, torch.float8_e4m3fn)]


def equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    """Compare bits, which torch does not do for e4m3."""
    return all(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "stored"), ROUNDINGS, ids=str)
def test_the_bits_are_those_of_the_separate_ops(group: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(2, 3, 80).to(dtype), torch.randn(2, 3, 80).to(dtype), torch.randn(80).to(dtype)
    rounded = RMS_NORM_ROUNDED(x, weight, EPS, 1.0, group, stored)
    assert equal(rounded, round_rows(RMS_NORM(x, weight, EPS, 1.0), group, stored))
    normed, total = ADD_RMS_NORM(x, residual, weight, EPS, 0.0)
    both = ADD_RMS_NORM_ROUNDED(x, residual, weight, EPS, 0.0, group, stored)
    assert equal(both, (*round_rows(normed, group, stored), total))


def test_a_sum_over_the_ranks_may_be_part_of_it() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)

    def compute(group: ThreadGroup) -> None:
        given = x * (group.rank + 1)
        others = (residual, weight, EPS, 0.0, WHOLE_TOKEN, torch.int8)
        wanted = ADD_RMS_NORM_ROUNDED(ALL_REDUCE(given), *others)
        assert equal(ALL_REDUCE_ADD_RMS_NORM_ROUNDED(given, *others), wanted)
        assert group.num_collectives == 2

    run_ranks(2, compute)


def test_the_ops_are_what_torch_wants_of_an_op() -> None:
    """Schema, fake results and aliasing, with rows that lie apart and a last group that is smaller."""
    x, weight = torch.randn(2, 3, 160)[..., :80], torch.randn(80)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(RMS_NORM_ROUNDED, (x, weight, EPS, 1.0, 32, torch.int8), test_utils=kinds)
    arguments = (x, x.clone(), None, EPS, 0.0, WHOLE_TOKEN, torch.int8)
    torch.library.opcheck(ADD_RMS_NORM_ROUNDED, arguments, test_utils=kinds)
