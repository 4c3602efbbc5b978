"""A gated activation over a merged projection becomes one op; where one does not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.fuse_act_mul import FuseActMul
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.act_mul import ACT_MUL
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import calls, graph_of, run, text
from tests.passes.traced_family import merged_family, traced_family
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensor = torch.Tensor


def sliced(y: Tensor) -> Tensor:
    return F.silu(y[..., :8]) * y[..., 8:16]


def sliced_in_full(y: Tensor) -> Tensor:
    return y[:, 8:] * F.gelu(y[:, 0:8])


def chunked(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)[0], y.chunk(2, dim=-1)[1]
    return up * F.gelu(gate, approximate="tanh")


def split(y: Tensor) -> Tensor:
    parts = torch.split(y, 8, -1)
    return F.silu(parts[0], inplace=False) * parts[1]


def split_by_sizes(y: Tensor) -> Tensor:
    parts = y.split([8, 8], 1)
    return F.gelu(parts[0], approximate="tanh") * parts[-1]


SPELLINGS: dict[Callable[[Tensor], Tensor], str] = {
    sliced: "silu",
    sliced_in_full: "gelu",
    chunked: "gelu_tanh",
    split: "silu",
    split_by_sizes: "gelu_tanh",
}


def fuse(graph: fx.Graph) -> PassResult:
    result = FuseActMul().apply(graph, FakeContext(graph))
    graph.lint()
    return result


def inputs(dtype: torch.dtype = torch.float32, columns: int = 16) -> Tensor:
    return (torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """They round at different places."""
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_op(spelling: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    y = inputs(dtype)
    graph = graph_of(spelling, y)
    assert fuse(graph) == PassResult(matches=1)
    assert text(graph) == [f"act_mul_default = act_mul(y, {SPELLINGS[spelling]})", "return (act_mul_default)"]
    assert_close(run(graph, y), spelling(y))


def test_halves_among_other_columns_are_a_view() -> None:
    """A router merged with its shared expert, say."""

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(y[..., 2:8]) * y[..., 8:14], y[..., :2]

    y = inputs()
    graph = graph_of(function, y)
    assert fuse(graph).matches == 1
    assert calls(graph) == ["getitem", "act_mul", "getitem"]
    for found, expected in zip(run(graph, y), function(y), strict=True):
        assert_close(found, expected)


def test_an_activation_that_gates_nothing_is_no_site() -> None:
    for function in (lambda y: F.gelu(y), lambda y: F.silu(y) * 0.5, lambda y: F.silu(y) * y[:, :1]):
        graph = graph_of(function, inputs())
        assert fuse(graph) == PassResult()


def up_first(y: Tensor) -> Tensor:
    up, gate = y[..., :8], y[..., 8:]
    return F.silu(gate) * up


def gap(y: Tensor) -> Tensor:
    return F.silu(y[..., :6]) * y[..., 8:14]


def interleaved(y: Tensor) -> Tensor:
    return F.silu(y[..., ::2]) * y[..., 1::2]


def two_tensors(y: Tensor) -> Tensor:
    return F.silu(y.neg()) * y


def second_reader(y: Tensor) -> Any:
    gate = F.silu(y[..., :8])
    return gate * y[..., 8:], gate


def two_dtypes(y: Tensor) -> Tensor:
    return F.silu(y[..., :8]) * y[..., 8:].double()


def in_place(y: Tensor) -> Tensor:
    return F.silu(y[..., :8], inplace=True) * y[..., 8:]


def written_between(y: Tensor) -> Tensor:
    gate = F.silu(y[..., :8])
    y.mul_(2.0)
    return gate * y[..., 8:]


def in_float64(y: Tensor) -> Tensor:
    wide = y.double()
    return F.silu(wide[..., :8]) * wide[..., 8:]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (up_first, "gate is columns 8:16 of y, up is 0:8; wanted is gate first"),
        (gap, "gate is columns 0:6 of y, up is 8:14; wanted are halves side by side"),
        (interleaved, "gate getitem and up getitem_1 are not slices of one tensor: are their projections merged?"),
        (two_tensors, "gate neg and up y are not slices of one tensor: are their projections merged?"),
        (second_reader, "it has a second reader: mul, output"),
        (two_dtypes, "silu is torch.float32 and double is torch.float64; wanted is one dtype"),
        (in_place, "it works in place"),
        (written_between, "y is changed in place by mul_, before mul is there"),
        (in_float64, "silu is torch.float64; wanted is float32 or shorter"),
    ],
)
def test_a_miss_says_why(function: Callable[[Tensor], Any], reason: str) -> None:
    graph = graph_of(function, inputs())
    before = str(graph)
    result = fuse(graph)
    assert result.matches == 0
    assert [miss.reason for miss in result.misses] == [reason]
    assert str(graph) == before


GATES = {
    "gemma2": (2, "gelu_tanh"),
    "gemma3": (3, "gelu_tanh"),  # of three layers
    "gpt-neox": (0, "gelu"),  # no gate
    "opt": (0, "relu"),
}
"""act_mul, and its activation, where it is not 2 and silu: an MLP a layer, or all experts of one."""


@pytest.mark.parametrize("name", families(FAMILIES))
def test_every_gate_of_a_model_family_matches(name: str) -> None:
    graph, context = merged_family(name, torch.bfloat16)
    result = FuseActMul().apply(graph, context)
    graph.lint()
    expected, activation = GATES.get(name, (2, "silu"))
    assert result == PassResult(matches=expected)
    assert [node.args[1] for node in graph.nodes if node.target is ACT_MUL] == [activation] * expected


def test_projections_that_are_not_merged_are_missed_out_loud() -> None:
    graph, context = traced_family("llama", torch.bfloat16)
    result = FuseActMul().apply(graph, context)
    assert result.matches == 0
    assert all("are their projections merged?" in miss.reason for miss in result.misses)
    assert len(result.misses) == 2
