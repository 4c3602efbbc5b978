"""The rounding of quantised linears' inputs becomes part of the norm that they read; where not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from piecegraph.passes.fuse_all_reduce import FuseAllReduce
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.quantised.fuse_norm_quant import FuseNormQuant
from tests.passes.pass_context import FakeContext
from tests.passes.quantised.quantised_linears import LINEARS, WEIGHTS, fp8, fp8_groups, int8, int8_of_parts
from tests.passes.spelled import calls, graph_of, run, text
from tests.runner.tensor_parallel.ranks_in_threads import ThreadGroup, run_ranks

Tensor = torch.Tensor
EPS = 1e-5
X, RESIDUAL = torch.randn(3, 32), torch.randn(3, 32)


def norm(x: Tensor) -> Any:
    return torch.ops.piecegraph.rms_norm.default(x, None, EPS, 0.0)


def add_norm(x: Tensor, residual: Tensor) -> Any:
    return torch.ops.piecegraph.add_rms_norm.default(x, residual, None, EPS, 0.0)


def traced(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> fx.Graph:
    return run_ranks(1, lambda group: graph_of(function, X.to(dtype), RESIDUAL.to(dtype), *WEIGHTS))[0]


def fuse(graph: fx.Graph) -> PassResult:
    result = FuseNormQuant().apply(graph, FakeContext(graph))
    graph.lint()
    return result


def block(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    normed, total = add_norm(x, residual)
    return int8(normed, w8, scale), total


def test_a_norm_and_its_linear_in_text() -> None:
    graph = traced(block)
    assert fuse(graph) == PassResult(matches=1)
    assert text(graph) == [
        "add_rms_norm_rounded_default = add_rms_norm_rounded(x, residual, None, 1e-05, 0.0, -1, torch.int8)",
        "getitem_2 = getitem(add_rms_norm_rounded_default, 0)",
        "getitem_3 = getitem(add_rms_norm_rounded_default, 1)",
        "getitem_4 = getitem(add_rms_norm_rounded_default, 2)",
        "rounded_linear_default = rounded_linear(getitem_2, getitem_3, w8, scale, None, (1, 0), -1, torch.float32)",
        "return ((rounded_linear_default, getitem_4))",
    ]


@pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: str(linear.__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_stay_the_same(linear: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """A norm alone, with two readers; and one after a sum, which is read elsewhere."""

    def function(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
        first = norm(x)
        one, other = linear(first, w8, wf, scale, scales), linear(first, w8, wf, scale, scales)
        normed, total = add_norm(x, residual)
        return one, other, linear(normed, w8, wf, scale, scales), total

    before, after = traced(function, dtype), traced(function, dtype)
    assert fuse(after) == PassResult(matches=2)
    assert [name for name in calls(after) if name != "getitem"] == [
        "rms_norm_rounded", "rounded_linear", "rounded_linear", "add_rms_norm_rounded", "rounded_linear",
    ]  # fmt: skip
    given = (X.to(dtype), RESIDUAL.to(dtype), *WEIGHTS)
    for found, expected in zip(run(after, *given), run(before, *given), strict=True):
        assert found.dtype is dtype and torch.equal(found, expected)


def test_a_sum_over_the_ranks_becomes_part_of_it() -> None:
    """`fuse-all-reduce` runs behind this pass."""

    def function(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
        return block(torch.ops.piecegraph.all_reduce.default(x * 2.0), residual, w8, wf, scale, scales)

    before, after = traced(function), traced(function)
    assert fuse(after).matches == 1
    result = run_ranks(1, lambda group: FuseAllReduce().apply(after, FakeContext(after)))[0]
    assert result == PassResult(matches=1)
    assert "all_reduce_add_rms_norm_rounded" in calls(after) and "all_reduce" not in calls(after)

    def compute(group: ThreadGroup) -> None:
        given = (X * (group.rank + 1), RESIDUAL, *WEIGHTS)
        for found, expected in zip(run(after, *given), run(before, *given), strict=True):
            assert torch.equal(found, expected)

    run_ranks(2, compute)


def read_in_floats(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    normed = norm(x)
    return int8(normed, w8, scale), normed * 2.0


def rounded_in_two_ways(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    normed = norm(x)
    return int8(normed, w8, scale), fp8(normed, wf, scales), fp8_groups(normed, wf, scales)


def of_parts(x: Tensor, residual: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    return int8_of_parts(norm(x), w8, scale, residual.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_in_floats, "it is read in floats, too, by mul"),
        (
            rounded_in_two_ways,
            "it is rounded in several ways: int8_inputs_linear_default to int8 for each token, fp8_linear_default to "
            "float8_e4m3fn for each token, fp8_linear_default_1 to float8_e4m3fn for groups of 16",
        ),
        (of_parts, "int8_inputs_linear_default rounds tokens of which other ranks have parts, by the magnitudes amax"),
    ],
)
def test_a_miss_says_why(function: Callable[..., Any], reason: str) -> None:
    graph = traced(function)
    before = str(graph)
    result = fuse(graph)
    assert (result.matches, [miss.reason for miss in result.misses]) == (0, [reason])
    assert str(graph) == before


def test_a_norm_that_no_linear_rounds_is_no_site() -> None:
    assert fuse(traced(lambda x, *others: norm(x) * 2.0)) == PassResult()
