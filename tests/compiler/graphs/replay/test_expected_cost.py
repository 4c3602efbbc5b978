"""The expected cost of a replay equals the cost that a capture finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.graphs.replay.expected_cost import expected_costs
from piecegraph.compiler.graphs.replay.prepared_ops import prepared_ops
from piecegraph.compiler.splitting.plan import CallStep
from piecegraph.compiler.splitting.segments import num_graphs
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

FOUR = pg.BatchDescriptor(num_tokens=4)


class Triples(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.pgtoy.triple.default(x + 1) - 1
        return result


def decoder() -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager")
    return pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(9, 2))


def assert_as_captured(
    compiled: pg.CompiledModel, inputs: list[torch.Tensor], refusal: Callable[[CallStep], str | None] | None = None
) -> Counter[str]:
    """The costs and notes expected are those of a capture; the costs."""
    rows = expected_costs(compiled.plan, prepared_ops(), refusal or (lambda step: None))
    costs = Counter(row.cost for row in rows)
    with compiled.capture([FOUR], lambda descriptor: inputs, mode="PIECEWISE") as graphs:
        assert graphs.costs(FOUR) == {"graph": num_graphs(compiled.plan, has_before=False, has_after=False), **costs}
        assert graphs.notes(FOUR) == Counter(row.note for row in rows if row.note)
    return costs


def test_an_op_without_a_prepare_is_dispatched() -> None:
    assert assert_as_captured(decoder(), list(batch(4, 2))) == {"dispatch": 3}


def test_a_prepared_op_is_launched() -> None:
    with pg.register_prepare(SPLIT_OPS[0], lambda *args: lambda metadata: None, lambda: None):
        assert assert_as_captured(decoder(), list(batch(4, 2))) == {"launch": 3}


def test_a_refusal_predicts_a_declined_call() -> None:
    def prepare(*args: Any) -> Callable[[Any], None] | str:
        return "too wide" if args[-1] == "layer.1" else lambda metadata: None

    with pg.register_prepare(SPLIT_OPS[0], prepare, lambda: None):
        costs = assert_as_captured(
            decoder(), list(batch(4, 2)), lambda step: "too wide" if step.args[-1] == "layer.1" else None
        )
    assert costs == {"launch": 2, "dispatch": 1}


def test_an_op_that_returns_costs_a_copy() -> None:
    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compiler="eager")
    compiled = pg.compile(Triples(), config, dynamic_dims={"x": 0}, example_inputs=(torch.ones(3),))
    assert assert_as_captured(compiled, [torch.ones(4)]) == {"dispatch + copy": 1}
    with pg.register_prepare("pgtoy::triple", lambda x: lambda metadata: None, lambda: None):
        assert assert_as_captured(compiled, [torch.ones(4)]) == {"dispatch + copy": 1}
