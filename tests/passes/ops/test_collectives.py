"""Ops that start with a sum over the ranks: what they overwrite, and that a compiled piece makes no copy for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.passes.ops.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_ADD_NORM_LINEAR,
    ALL_REDUCE_ADD_RMS_NORM,
    running_in,
)
from piecegraph.passes.ops.quantised.rounded_norms import ALL_REDUCE_ADD_RMS_NORM_ROUNDED, WITHOUT_SUM
from piecegraph.passes.ops.rms_norm import add_rms_norm
from tests.runner.tensor_parallel.ranks_in_threads import run_ranks

EPS = 1e-6
X, RESIDUAL, SCALE, WEIGHT = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(12, 8)


@pytest.mark.parametrize(
    ("op", "others"),
    [
        (ALL_REDUCE_ADD_RMS_NORM, (RESIDUAL, SCALE, EPS, 0.0)),
        (ALL_REDUCE_ADD_NORM_LINEAR, (RESIDUAL, SCALE, EPS, 0.0, WEIGHT, None, "gelu")),
        (ALL_REDUCE_ADD_RMS_NORM_ROUNDED, (RESIDUAL, SCALE, EPS, 0.0, -1, torch.int8)),
    ],
)
def test_an_op_is_a_sum_and_the_op_without_it(op: Any, others: tuple[Any, ...]) -> None:
    """The sum is in the memory of the first argument, as the schema says; nothing else is written."""

    def compute(group: object) -> None:
        torch.library.opcheck(op, (X.clone(), *others), test_utils=("test_schema", "test_faketensor"))
        x = X.clone()
        found, expected = op(x, *others), WITHOUT_SUM[op](ALL_REDUCE(X), *others)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(x, ALL_REDUCE(X))

    run_ranks(1, compute)


class _Doubles:
    """A group of two ranks that are equal, which counts the sums that are made in a copy."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.copied, self.in_place = 0, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.copied += 1
        return x * 2

    def all_reduce_in_place(self, x: torch.Tensor) -> None:
        self.in_place += 1
        x.mul_(2)

    def add_up_and_norm(self, *of_norm: Any) -> Any:
        """Have no kernel for it."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // 2] * 2


class _Norms(_Doubles):
    """A group that has one kernel for a sum and the norm behind it."""

    def add_up_and_norm(self, *of_norm: Any) -> Any:
        x, *others = of_norm
        return add_rms_norm(x * 2, *others)


@pytest.mark.parametrize("op", [ALL_REDUCE_ADD_RMS_NORM, ALL_REDUCE_ADD_NORM_LINEAR])
def test_a_group_with_one_kernel_for_a_sum_and_its_norm_makes_no_sum(op: Any) -> None:
    linear = (WEIGHT, None, "gelu") if op is ALL_REDUCE_ADD_NORM_LINEAR else ()
    found = []
    for group in (_Doubles(), _Norms()):
        with running_in(group):
            found.append(op(X.clone(), RESIDUAL, SCALE, EPS, 0.0, *linear))
        assert (group.in_place, group.copied) == (int(type(group) is _Doubles), 0)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x * 3.0 + ALL_REDUCE(self.linear(torch.relu(x)))
        normed: torch.Tensor = torch.rms_norm(total, (16,), self.scale, EPS)
        return normed + total


@pytest.mark.slow
def test_a_compiled_piece_adds_up_in_place() -> None:
    """Inductor sees that nothing else reads what the op overwrites, and the bits are those of a sum in a copy."""
    module, x, found = _Block().requires_grad_(False), torch.randn(5, 16), []
    for passes, counts in ((("fuse-add-rms-norm",), (1, 0)), (("fuse-add-rms-norm", "fuse-all-reduce"), (0, 1))):
        group = _Doubles()
        config = pg.CompileConfig(passes=passes, compile_workers=0, cache=False)
        with running_in(group):
            compiled = pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(x,))
            assert [row.matches for row in compiled.report().passes] == [1] * len(passes)
            group.copied = group.in_place = 0
            found.append(compiled(x))
        assert (group.copied, group.in_place) == counts
        torch.testing.assert_close(found[-1], _expected(module, x))
    assert torch.equal(*found)


def _expected(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with running_in(_Doubles()):
        result: torch.Tensor = module(x)
        return result
