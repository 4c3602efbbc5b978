"""Calls that return their input leave the graph, bit for bit; calls that only seem to do so stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from piecegraph.compiler.rewriting.pass_contexts import FixedInputs
from piecegraph.compiler.rewriting.run_pass import PassOutcome, run_pass
from piecegraph.compiler.tracing.trace import trace
from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.matching.single_products import MATMUL
from piecegraph.passes.matching.torch_ir import is_call
from tests.passes.family_runs import family, prompt
from tests.quick_families import SLOW, families
from tests.runner.tiny_models import FAMILIES, UNLISTED

Function = Callable[[torch.Tensor], Any]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def graph_of(function: Function, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """Return the graph that Dynamo writes for `function` of a tensor `[num_tokens, 4]`."""
    x = torch.zeros(3, 4).to(dtype)
    return trace(_Module(function), (x,), {}, {"x": {0: "num_tokens"}}).graph_module.graph


def eliminate(graph: fx.Graph) -> PassOutcome:
    outcome = run_pass(EliminateNoops(), graph, FixedInputs())
    assert not outcome.error, outcome
    return outcome


def calls(graph: fx.Graph) -> list[str]:
    """The names of what computes tensors."""
    return [
        str(node.target) if node.op == "call_method" else node.target.__name__
        for node in graph.nodes
        if node.op in ("call_method", "call_function")
        and (isinstance(node.meta.get("example_value"), torch.Tensor) or node.users)
        and not isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymBool)
    ]


NOOPS: dict[str, Function] = {
    "to": lambda x: x.sin().to(torch.float32).cos(),
    "to a device": lambda x: x.sin().to(device="cpu").cos(),
    "float": lambda x: x.sin().float().cos(),
    "type_as": lambda x: x.sin().type_as(x).cos(),
    "contiguous": lambda x: x.sin().contiguous().cos(),
    "view": lambda x: x.sin().view(x.shape[0], 4).cos(),
    "reshape": lambda x: x.sin().reshape(-1, 4).cos(),
    "expand": lambda x: x.sin().expand(-1, 4).cos(),
    "times one": lambda x: (x.sin() * 1.0).cos(),
    "one times": lambda x: (1 * x.sin()).cos(),
    "by one": lambda x: (x.sin() / 1.0).cos(),
    "minus zero": lambda x: (x.sin() - 0.0).cos(),
    "clone": lambda x: x.sin().clone().cos(),
    "copying cast": lambda x: x.sin().to(torch.float32, copy=True).cos(),
    "transposed twice": lambda x: x.sin().transpose(0, 1).transpose(1, 0).cos(),
    "unsqueezed, squeezed": lambda x: x.sin().unsqueeze(0).squeeze(0).cos(),
    "viewed there and back": lambda x: x.sin().view(-1, 2, 2).view(-1, 4).cos(),
    "all rows": lambda x: x.sin()[:].cos(),
    "all columns": lambda x: x.sin()[..., :4].cos(),
    "dropout in eval": lambda x: F.dropout(x.sin(), 0.5, training=False).cos(),
    "dropout of nothing": lambda x: F.dropout(x.sin(), 0.0).cos(),
    "unread": lambda x: (x.exp(), x.sin().cos())[1],
}


@pytest.mark.parametrize("name", NOOPS)
def test_calls_that_change_nothing_are_removed(name: str) -> None:
    graph = graph_of(NOOPS[name])
    before = len(calls(graph))
    outcome = eliminate(graph)
    assert calls(graph) == ["sin", "cos"]
    assert outcome.matches == outcome.nodes_removed >= max(before - 2, 1)
    assert outcome.misses == ()


STAYS: dict[str, Function] = {
    "a real cast": lambda x: x.sin().to(torch.float16).cos(),
    "a copy to another layout": lambda x: x.sin().t().contiguous().cos(),
    "a shape that only some sizes have": lambda x: x.sin().reshape(4, -1).cos(),
    "plus zero: -0.0 becomes 0.0": lambda x: (x.sin() + 0.0).cos(),
    "minus -0.0": lambda x: (x.sin() - -0.0).cos(),
    "one by": lambda x: (1.0 / x.sin()).cos(),
    "zero minus": lambda x: (0.0 - x.sin()).cos(),
    "some columns": lambda x: x.sin()[..., :3].cos(),
    "other columns": lambda x: x.sin()[:, [1, 0, 2, 3]].cos(),
    "backwards": lambda x: x.sin().flip(0).cos(),
    "transposed once": lambda x: x.sin().transpose(0, 1).cos(),
    "as many numbers in another order": lambda x: x.sin().t().reshape(-1, 4).cos(),
}


@pytest.mark.parametrize("name", STAYS)
def test_calls_that_change_something_stay(name: str) -> None:
    graph = graph_of(STAYS[name])
    before = calls(graph)
    assert len(before) >= 3
    assert eliminate(graph).matches == 0
    assert calls(graph) == before


def test_assertions_about_sizes_stay() -> None:
    """The compiler has yet to take them out of the graph."""
    graph = graph_of(NOOPS["view"])
    assertions = [node.name for node in graph.nodes if "assert" in node.name]
    eliminate(graph)
    assert assertions and assertions == [node.name for node in graph.nodes if "assert" in node.name]


def test_plus_zero_goes_where_numbers_are_whole() -> None:
    graph = graph_of(lambda x: (x.abs() + 0).neg(), torch.int64)
    assert eliminate(graph).matches == 1
    assert calls(graph) == ["abs", "neg"]


def test_a_copy_stays_that_one_side_writes_to() -> None:
    """Through whichever name it is written."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        kept = y.clone()
        y.view(-1).add_(1.0)
        return y.cos() + kept

    graph = graph_of(function)
    outcome = eliminate(graph)
    assert "clone" in calls(graph)
    (miss,) = outcome.misses
    assert "one of the two is changed in place" in miss.reason


def test_an_output_keeps_memory_of_its_own() -> None:
    graph = graph_of(lambda x: (x.sin(), x.sin().clone(), x.clone(), x * 1.0))
    outcome = eliminate(graph)
    assert calls(graph).count("clone") == 2 and "mul" in calls(graph)
    assert all("memory of its own" in miss.reason for miss in outcome.misses) and len(outcome.misses) == 3
    (output,) = graph.find_nodes(op="output")
    assert len(set(output.args[0])) == len(output.args[0])


def test_an_output_does_not_become_the_input() -> None:
    graph = graph_of(lambda x: (x.view(-1, 4), x.cos()))
    outcome = eliminate(graph)
    assert "view" in calls(graph)
    assert "they would be one object" in outcome.misses[0].reason


def test_memory_that_is_written_may_lose_views() -> None:
    """A view is the same memory under either name."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.view(-1, 4).add_(1.0)
        return y.cos()

    graph = graph_of(function)
    assert eliminate(graph).matches == 1
    assert calls(graph) == ["sin", "add_", "cos"]


def num_matmuls(graph: fx.Graph) -> int:
    return sum(is_call(node, MATMUL) for node in graph.nodes)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *families((*FAMILIES, *UNLISTED), torch.bfloat16),  # with every cast a model has
        *families(("llama", "deepseek-v3"), torch.float32),
        *(pytest.param(name, torch.float32, marks=SLOW) for name in ("gemma3", "phi3", "qwen3-moe")),
    ],
)
def test_logits_are_the_same_bits(name: str, dtype: torch.dtype) -> None:
    model = family(name, dtype)
    expected = [model.logits(prompt(n), [n - 1, 0]) for n in (1, 7)]
    matmuls = num_matmuls(model.graph)
    (outcome,) = model.apply(EliminateNoops())
    assert outcome.matches == outcome.nodes_removed + matmuls - num_matmuls(model.graph)
    assert outcome.nodes_removed >= 10
    for n, logits in zip((1, 7), expected, strict=True):
        assert torch.equal(model.logits(prompt(n), [n - 1, 0]), logits)
    (again,) = model.apply(EliminateNoops())
    assert again.matches == 0
    assert again.misses == ()
