"""Words for torch IR: the same answer for every spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from piecegraph.passes.matching import torch_ir as ir
from tests.passes.spelled import graph_of

Y = torch.randn(3, 16)


def last_call(function: Any, *inputs: torch.Tensor) -> fx.Node:
    graph = graph_of(function, *(inputs or (Y,)))
    return [node for node in graph.nodes if node.op.startswith("call_")][-1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y: y[..., 2:5], (2, 5)),
        (lambda y: y[..., :5], (0, 5)),
        (lambda y: y[..., 5:], (5, 16)),
        (lambda y: y[:, -4:], (12, 16)),
        (lambda y: y.chunk(2, dim=-1)[1], (8, 16)),
        (lambda y: torch.split(y, [2, 6, 8], 1)[-2], (2, 8)),
        (lambda y: y[..., ::2], None),
        (lambda y: y[1:, :4], None),
        (lambda y: y[1:], None),
        (lambda y: y[..., None, :4], None),
        (lambda y: y.chunk(3, dim=0)[1], None),
        (lambda y: y + 1, None),
    ],
)
def test_an_index_or_part_is_found_as_columns_of_a_tensor(function: Any, expected: tuple[int, int] | None) -> None:
    columns = ir.columns_of(last_call(function))
    assert (columns and (columns.source.name, columns.start, columns.stop)) == (expected and ("y", *expected))


def test_columns_are_those_that_the_node_has() -> None:
    """Against the values themselves."""
    functions: tuple[Any, ...] = (lambda y: y[..., 3:9], lambda y: y.split(5, -1)[3], lambda y: y.chunk(3, -1)[-1])
    for function in functions:
        columns = ir.columns_of(last_call(function))
        assert columns is not None
        assert torch.equal(Y[:, columns.start : columns.stop], function(Y))


@pytest.mark.parametrize(
    ("function", "is_cast"),
    [
        (lambda y: y.to(torch.float64), True),
        (lambda y: y.to(dtype=torch.float16), True),
        (lambda y: y.half(), True),
        (lambda y: y.float(), True),
        (lambda y: y.to("meta"), False),
        (lambda y: y.neg(), False),
    ],
)
def test_a_cast_is_traced_to_its_source(function: Any, is_cast: bool) -> None:
    node = last_call(function)
    assert (ir.cast_source(node) is not None) == is_cast


def test_widening_casts_lose_nothing() -> None:
    short = Y.bfloat16()
    assert ir.strip_widening(last_call(lambda y: y.float().double(), short)).name == "y"
    assert ir.strip_widening(last_call(lambda y: y.half().float(), short)).name == "half"
    assert not ir.is_widening(torch.bfloat16, torch.float16)
    assert not ir.is_widening(torch.int32, torch.float32)


def test_operands_of_a_call_without_options() -> None:
    assert ir.operands(last_call(lambda y: 2 * y), ir.MUL) is not None
    assert ir.operands(last_call(lambda y: torch.mul(y, other=y)), ir.MUL) is not None
    assert ir.operands(last_call(lambda y: torch.add(y, y, alpha=2)), ir.ADD) is None
    assert ir.operands(last_call(lambda y: y + y), ir.MUL) is None


def test_swapped_dims() -> None:
    swap = ir.swapped_dims(last_call(lambda y: y.transpose(-1, 0)))
    assert swap is not None
    assert swap[1:] == (1, 0)
    assert ir.swapped_dims(last_call(lambda y: y.neg())) is None


def test_dead_nodes_are_erased_and_others_stay() -> None:
    graph = graph_of(lambda y: (y + 1, (y * 2).neg()), Y)
    mul, neg = (next(node for node in graph.nodes if node.name == name) for name in ("mul", "neg"))
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][0],)
    ir.erase_unread(graph, (mul, neg, *graph.find_nodes(op="placeholder")))
    assert [node.name for node in graph.nodes] == ["y", "add", "output"]
