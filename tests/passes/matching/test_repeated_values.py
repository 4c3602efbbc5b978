"""Values that a graph computes twice are computed once, where that makes no more tensors cross a cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from piecegraph.compiler.tracing.trace import trace
from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.matching.effects import erase_dead
from piecegraph.passes.matching.graph_pass import Miss
from piecegraph.passes.matching.repeated_values import merge_repeated_values
from tests.passes.family_runs import family
from tests.passes.pass_context import FakeContext


class _Module(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.function(x, table)


def merge(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[list[str], tuple[Miss, ...]]:
    """The calls left of a function of two tensors `[num_tokens, 4]`, `tanh` being its split op."""
    dims = {"x": {0: "num_tokens"}, "table": {0: "num_tokens"}}
    graph = trace(_Module(function), (torch.zeros(3, 4), torch.zeros(3, 4)), {}, dims).graph_module.graph
    misses = merge_repeated_values(graph, FakeContext(graph, _is_cut))
    erase_dead(graph)
    graph.lint()
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    return [
        node.target if node.op == "call_method" else node.target.__name__
        for node in tensors
        if node.op != "placeholder"
    ], misses


def _is_cut(node: fx.Node) -> bool:
    return node.target is torch.tanh


def test_equal_calls_of_one_piece_become_one() -> None:
    calls, misses = merge(lambda x, table: x * table.cos() + x * table.cos())
    assert calls == ["cos", "mul", "add"]
    assert misses == ()


def test_calls_with_other_arguments_are_not_merged() -> None:
    """1 and 1.0 included, and dims, and the order of operands."""
    calls, _ = merge(lambda x, table: (x - table) * (table - x) + x.unsqueeze(0) + x.unsqueeze(1) + (x**2 - x**2.0))
    assert calls.count("sub") == 3
    assert calls.count("unsqueeze") == calls.count("pow") == 2


def test_a_view_of_what_crosses_crosses_instead() -> None:
    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos = table.cos()
        for _ in range(3):
            x = torch.tanh(x * cos.unsqueeze(0)[0])
        return x

    calls, misses = merge(layers)
    assert calls.count("unsqueeze") == calls.count("getitem") == 1
    assert misses == ()


def test_the_first_piece_to_use_a_table_is_like_the_others() -> None:
    """Its view is taken where the table is made: else the piece that takes it would be one of its own."""

    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos = table.cos()
        x = torch.tanh(x + cos)
        x = torch.tanh(x)
        for _ in range(3):
            x = torch.tanh(x * cos.unsqueeze(0))
        return x

    calls, _ = merge(layers)
    assert calls.count("unsqueeze") == 1
    assert calls.index("unsqueeze") < calls.index("tanh")


def test_nothing_crosses_a_cut_that_did_not() -> None:
    """Cheap to compute of inputs, which every piece has: no reason for boundary memory."""

    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x * table.cos())
        return x

    calls, misses = merge(layers)
    assert calls.count("cos") == 3
    assert misses == ()  # nothing crossed to begin with


def test_a_wider_tensor_does_not_cross_in_the_place_of_a_narrow_one() -> None:
    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos = table.cos().half()
        for _ in range(3):
            x = torch.tanh(x * cos.float())
        return x

    calls, misses = merge(layers)
    assert calls.count("float") == 3
    assert len(misses) == 2 and "of an earlier piece" in misses[0].reason


def test_a_value_that_is_needed_as_it_is_keeps_its_view_apart() -> None:
    """Both would cross."""

    def layers(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos = table.cos()
        for _ in range(3):
            x = torch.tanh((x + cos) * cos.unsqueeze(0).sum(0))
        return x

    calls, misses = merge(layers)
    assert calls.count("unsqueeze") == 3
    assert "makes 1 tensors cross the cut where 0 do" in misses[0].reason


def test_values_that_are_changed_in_place_are_not_merged() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        before = y.cos()
        y.add_(1.0)
        return before + y.cos()

    calls, _ = merge(function)
    assert calls.count("cos") == 2


def test_results_that_are_changed_in_place_stay_apart() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x.cos().add_(1.0) * x.cos()

    calls, _ = merge(function)
    assert calls.count("cos") == 2


@pytest.mark.slow
def test_rotary_tables_are_made_once_a_step() -> None:
    """Gemma3 has two kinds of tables; glm4 and ernie4.5 rearrange theirs in every layer."""
    for name, layers, tables in (("gemma3", 6, 4), ("glm4", 4, 2), ("ernie4.5", 4, 2), ("qwen3", 4, 2)):
        model = family(name, torch.bfloat16, layers)
        before = len(model.unique_pieces())
        model.apply(EliminateNoops())
        nodes = [node for node in model.graph.nodes if node.target == "unsqueeze"]
        assert len([node for node in nodes if node.name.startswith(("cos", "sin"))]) == tables, name
        laid_out = 2 if name in ("glm4", "ernie4.5") else 0
        assert len([node for node in model.graph.nodes if node.target == "repeat_interleave"]) == laid_out
        assert len(model.unique_pieces()) <= before
