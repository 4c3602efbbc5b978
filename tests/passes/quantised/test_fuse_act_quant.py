"""The rounding of a quantised linear's input becomes part of the gated activation; where not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.quantised.fuse_act_quant import FuseActQuant
from tests.passes.pass_context import FakeContext
from tests.passes.quantised.quantised_linears import LINEARS, WEIGHTS, int8, int8_of_parts
from tests.passes.spelled import calls, graph_of, run, text

Tensor = torch.Tensor
GATE_UP = torch.randn(3, 64)


def act_mul(gate_up: Tensor) -> Any:
    return torch.ops.piecegraph.act_mul.default(gate_up, "silu")


def fuse(graph: fx.Graph) -> PassResult:
    result = FuseActQuant().apply(graph, FakeContext(graph))
    graph.lint()
    return result


def test_an_activation_and_its_linear_in_text() -> None:
    def function(y: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Tensor:
        return int8(act_mul(y), w8, scale)

    graph = graph_of(function, GATE_UP, *WEIGHTS)
    assert fuse(graph) == PassResult(matches=1)
    assert text(graph) == [
        "act_mul_rounded_default = act_mul_rounded(y, silu, -1, torch.int8)",
        "getitem = getitem(act_mul_rounded_default, 0)",
        "getitem_1 = getitem(act_mul_rounded_default, 1)",
        "rounded_linear_default = rounded_linear(getitem, getitem_1, w8, scale, None, (1, 0), -1, torch.float32)",
        "return (rounded_linear_default)",
    ]


@pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: str(linear.__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_stay_the_same(linear: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def function(y: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Tensor:
        return linear(act_mul(y), w8, wf, scale, scales)

    given = (GATE_UP.to(dtype), *WEIGHTS)
    before, after = (graph_of(function, *given) for _ in range(2))
    assert fuse(after) == PassResult(matches=1)
    assert calls(after) == ["act_mul_rounded", "getitem", "getitem", "rounded_linear"]
    found = run(after, *given)
    assert found.dtype is dtype and torch.equal(found, run(before, *given))


def read_in_floats(y: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    act = act_mul(y)
    return int8(act, w8, scale), act.sum()


def of_parts(y: Tensor, w8: Tensor, wf: Tensor, scale: Tensor, scales: Tensor) -> Any:
    """The second projection of an MLP that is divided among ranks."""
    act = act_mul(y)
    return int8_of_parts(act, w8, scale, act.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_in_floats, "it is read in floats, too, by sum_1"),
        (of_parts, "int8_inputs_linear_default rounds tokens of which other ranks have parts, by the magnitudes amax"),
    ],
)
def test_a_miss_says_why(function: Callable[..., Any], reason: str) -> None:
    graph = graph_of(function, GATE_UP, *WEIGHTS)
    before = str(graph)
    result = fuse(graph)
    assert (result.matches, [miss.reason for miss in result.misses]) == (0, [reason])
    assert str(graph) == before


def test_an_activation_that_no_linear_rounds_is_no_site() -> None:
    assert fuse(graph_of(lambda y: act_mul(y) * 2.0, GATE_UP)) == PassResult()
