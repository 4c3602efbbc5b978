"""Large linears in float32 are oneDNN's, and compute what torch's compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.cpu.use_onednn import MIN_NUMBERS, UseOneDNN
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.cpu.onednn_linear import ONEDNN_LINEAR
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import graph_of, run

Tensor = torch.Tensor
SIZE = 512
NUM_COLUMNS = MIN_NUMBERS // SIZE


def passed(graph: fx.Graph) -> PassResult:
    result = UseOneDNN().apply(graph, FakeContext(graph))
    graph.lint()
    return result


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight=weight, bias=bias)


def of_a_transpose(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.t())


WEIGHT, BIAS = drawn(NUM_COLUMNS, SIZE), drawn(NUM_COLUMNS)
SPELLINGS = [(plain, (WEIGHT,)), (with_bias, (WEIGHT, BIAS)), (of_a_transpose, (WEIGHT.t().contiguous(),))]


@pytest.mark.parametrize("x_shape", [(SIZE,), (1, SIZE), (8, SIZE), (0, SIZE), (1, 5, SIZE)])
@pytest.mark.parametrize(("function", "weights"), SPELLINGS, ids=["plain", "bias", "transposed"])
def test_a_large_linear_matches_and_is_exact(function, weights, x_shape) -> None:  # type: ignore[no-untyped-def]
    """Beside float64: sums of 512 products, in an order of oneDNN's, are off by no more than float32's rounding."""
    inputs = (drawn(*x_shape), *weights)
    graph = graph_of(function, *inputs)
    assert passed(graph) == PassResult(1)
    assert targets(graph) == [ONEDNN_LINEAR]
    result = run(graph, *inputs)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), function(*(each.double() for each in inputs)), rtol=1e-5, atol=1e-4)


def test_small_ones_and_other_dtypes_are_no_sites() -> None:
    """A call of oneDNN costs more there than it saves; for bfloat16 torch calls it by itself."""
    x = drawn(2, SIZE)
    for one, weight in ((x, WEIGHT[:-1]), (x.bfloat16(), WEIGHT.bfloat16()), (x.double(), WEIGHT.double())):
        graph = graph_of(plain, one, weight)
        assert passed(graph) == PassResult()
        assert targets(graph) == [F.linear]


def test_a_weight_with_gaps_is_a_miss() -> None:
    graph = graph_of(plain, drawn(2, SIZE), drawn(NUM_COLUMNS, 2 * SIZE)[:, ::2])
    result = passed(graph)
    assert result.matches == 0
    assert [miss.reason for miss in result.misses] == ["its weight has the strides (1024, 2)"]
