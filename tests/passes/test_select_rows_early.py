"""Rows that sample are taken first; what works row by row gives the same for them."""

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
from piecegraph.passes.ops.collectives import ALL_REDUCE
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM
from piecegraph.passes.select_rows_early import SelectRowsEarly
from tests.passes.family_runs import family, graph_inputs, prompt
from tests.quick_families import families
from tests.runner.tensor_parallel.ranks_in_threads import run_ranks
from tests.runner.tiny_models import FAMILIES, UNLISTED

MOE = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")
"""Their experts sort tokens, which is nothing a row does alone: the last of their layers stays on all rows."""

Function = Callable[[torch.Tensor, torch.Tensor], Any]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
        return self.function(torch.tanh(x), index)


def moved(function: Function, chosen_pass: SelectRowsEarly | None = None) -> tuple[PassOutcome, list[tuple[str, str]]]:
    """Return the calls after the split op in a function of `tanh(x)` [num_tokens, 4] and `index` [num_rows], each with
    the number of rows of its result.

    The function runs before and after the pass, and must give the same.
    """
    x, index = torch.randn(5, 4), torch.tensor([3, 0, 3])
    traced = trace(_Module(function), (x, index), {}, {"x": {0: "num_tokens"}, "index": {0: "num_rows"}})
    graph = traced.graph_module.graph
    sizes = {name: symbol for symbol, name in traced.size_symbols.items()}
    names = {sizes["num_tokens"]: "all", sizes["num_rows"]: "chosen"}

    def run() -> Any:
        inputs = graph_inputs(traced, (x, index))
        return fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs)

    expected = run()
    outcome = run_pass(chosen_pass or SelectRowsEarly(), graph, FixedInputs(lambda node: node.target is torch.tanh))
    assert not outcome.error, outcome
    for old, new in zip(expected, run(), strict=True):
        assert torch.equal(old, new)
    nodes = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    nodes = nodes[[node.target for node in nodes].index(torch.tanh) + 1 :]
    return outcome, [
        (
            str(node.target) if node.op == "call_method" else node.target.__name__,
            next((names[str(s)] for s in node.meta["example_value"].shape if str(s) in names), ""),
        )
        for node in nodes
        if node.op != "placeholder"
    ]


def int8_inputs_linear(h: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    weight, scale = torch.ones(4, 4, dtype=torch.int8), torch.ones(4)
    out: torch.Tensor = torch.ops.piecegraph.int8_inputs_linear.default(h, weight, scale, None, largest)
    return out


ROW_WISE: dict[str, Function] = {
    "elementwise": lambda h, i: (h * 2 + h.sin())[i],
    "norm": lambda h, i: (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))[i],
    "layer norm": lambda h, i: F.layer_norm(h, (4,))[i],
    "softmax": lambda h, i: F.softmax(h, dim=-1)[i],
    "columns": lambda h, i: (h[..., :2] * h[..., 2:])[i],
    "chunks": lambda h, i: torch.mul(*h.chunk(2, dim=-1))[i],
    "concatenated columns": lambda h, i: torch.cat((h, -h), dim=-1)[i],
    "casts": lambda h, i: h.double().exp().type_as(h)[i],
    "views": lambda h, i: h.view(1, -1, 2, 2).exp().flatten(2)[:, i, :],
    "transposes": lambda h, i: h.exp().transpose(0, 1).cos()[:, i],
    "index_select": lambda h, i: torch.index_select(h.exp(), 0, i),
    "ellipsis": lambda h, i: h.transpose(0, 1).exp()[..., i],
    "quantised linear": lambda h, i: int8_inputs_linear(h)[i],
    "quantised linear with given magnitudes": lambda h, i: int8_inputs_linear(h, h.abs().amax(-1, keepdim=True))[i],
    "negative dim": lambda h, i: torch.index_select(h.exp(), -2, i),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_are_chosen_first(name: str) -> None:
    outcome, calls = moved(ROW_WISE[name])
    assert (outcome.matches, outcome.misses) == (1, ())
    assert next(call for call in calls if call[0] != "ones") == (
        "index_select" if name in ("index_select", "negative dim") else "getitem",
        "chosen",
    )
    assert all(rows == "chosen" for name, rows in calls if name != "ones"), calls


NOT_ROW_WISE: dict[str, tuple[Function, str]] = {
    "a sum of rows": (lambda h, i: h.cumsum(0)[i], "not known to work row by row"),
    "a mean of rows": (lambda h, i: (h - h.mean(0, keepdim=True)).softmax(0)[i], "over the rows"),
    "rows in another order": (lambda h, i: h.flip(0)[i], "not known to work row by row"),
    "neighbours": (lambda h, i: torch.cat((h, h), dim=0)[i], "is along the rows"),
    "read elsewhere": (lambda h, i: ((y := h.exp())[i], y.sum(0)), "is also read by"),
    "an output": (lambda h, i: ((y := h.exp())[i], y), "is also read by output"),
    "at random": (lambda h, i: F.dropout(h, 0.5, training=True)[i] * 0, "draws at random"),
    "nothing to move": (lambda h, i: h[i], "not computed after the last split op"),
    "changed in place": (lambda h, i: h.exp().mul_(2)[i], "changed in place"),
}


@pytest.mark.parametrize("name", NOT_ROW_WISE)
def test_a_choice_that_cannot_move_says_why(name: str) -> None:
    function, reason = NOT_ROW_WISE[name]
    outcome, _ = moved(function)
    assert outcome.matches == 0
    (miss,) = outcome.misses
    assert reason in miss.reason


def test_a_choice_of_rows_moves_as_far_back_as_it_can() -> None:
    """Calls that mix rows, or are read elsewhere, stay on all rows; later calls move."""
    outcome, calls = moved(lambda h, i: ((h.exp() + (y := h.cumsum(0))).sin()[i], y))
    assert outcome.matches == 1
    assert [(name, rows) for name, rows in calls if name != "getitem"] == [
        ("cumsum", "all"),
        ("exp", "chosen"),
        ("add", "chosen"),
        ("sin", "chosen"),
    ]


def test_a_sum_is_chosen_from_not_its_parts() -> None:
    outcome, calls = moved(lambda h, i: (h.cumsum(0) + h.cumprod(0)).sin()[i])
    assert outcome.matches == 1
    assert calls == [
        ("cumsum", "all"),
        ("cumprod", "all"),
        ("add", "all"),
        ("getitem", "chosen"),
        ("sin", "chosen"),
    ]


def test_values_of_weights_alone_come_after_the_choice_of_rows() -> None:
    """Ahead of it, it would be a piece of its own."""
    weight = torch.ones(4)
    _, calls = moved(lambda h, i: (h * weight.double().float().exp())[i])
    assert calls[0] == ("getitem", "chosen")


def test_a_choice_by_the_callers_index_only() -> None:
    """Indexing inside a layer is no site: neither by what is computed, nor by as many rows as there are."""
    outcome, _ = moved(lambda h, i: (h.exp()[h.sum(-1).argsort()], i + 1))
    assert (outcome.matches, outcome.misses) == (0, ())


def test_a_graph_without_split_ops_is_left_alone() -> None:
    """A graph of nodes and edges may choose more rows than there are, and each would be computed."""
    x, index = torch.randn(5, 4), torch.tensor([3, 0, 3] * 10)
    module = _Module(lambda h, i: h.exp()[i])
    traced = trace(module, (x, index), {}, {"x": {0: "num_tokens"}, "index": {0: "num_rows"}})
    outcome = run_pass(SelectRowsEarly(), traced.graph_module.graph, FixedInputs(lambda node: False))
    assert (outcome.matches, outcome.misses) == (0, ())


def test_matmuls_can_stay_on_all_rows() -> None:
    weight = torch.ones(4, 4)
    for through in (True, False):
        outcome, calls = moved(lambda h, i: (h @ weight).exp()[i], SelectRowsEarly(through_matmuls=through))
        assert outcome.matches == 1
        assert ("matmul", "chosen" if through else "all") in calls
        assert ("exp", "chosen") in calls


def test_our_norms_are_row_wise() -> None:
    outcome, calls = moved(lambda h, i: ADD_RMS_NORM(h.exp(), h, None, 1e-6, 0.0)[0][i])
    assert outcome.matches == 1
    assert [name for name, _ in calls if name == "getitem"] and all(rows == "chosen" for _, rows in calls)


def test_a_sum_over_ranks_is_row_wise() -> None:
    """All ranks choose the same rows, so fewer are added up."""
    outcome, calls = run_ranks(1, lambda group: moved(lambda h, i: ALL_REDUCE(h.exp())[i]))[0]
    assert outcome.matches == 1
    assert {("exp", "chosen"), ("all_reduce.default", "chosen")} <= set(calls), calls


def test_an_item_is_chosen_from_where_its_tuple_stays() -> None:
    outcome, calls = moved(lambda h, i: ((y := ADD_RMS_NORM(h.exp(), h, None, 1e-6, 0.0))[0].sin()[i], y[1]))
    assert outcome.matches == 1
    assert {("getitem", "chosen"), ("sin", "chosen")} <= set(calls)


@pytest.mark.parametrize("name", families([*FAMILIES, *UNLISTED]))
def test_logits_are_those_of_all_rows(name: str) -> None:
    """Indices in any order, with repeats, one, and all; float32, to what a matmul of fewer rows rounds otherwise.
    The rows of a model's end but for its experts' are those that sample."""
    choices = ((8, [7]), (8, [5, 0, 5, 7]), (6, [0, 1, 2, 3, 4, 5]), (1, [0, 0]))
    for through in (True, False):
        model = family(name, torch.float32)
        expected = [model.logits(prompt(n), rows) for n, rows in choices]
        _, outcome = model.apply(EliminateNoops(), SelectRowsEarly(through_matmuls=through))
        assert (outcome.matches, outcome.misses) == (1, ())
        for (n, rows), logits in zip(choices, expected, strict=True):
            torch.testing.assert_close(model.logits(prompt(n), rows), logits, rtol=1e-4, atol=1e-4)
        norm = [node for node in model.nodes_after_attention() if node.target in (torch.rsqrt, F.layer_norm)][-1]
        num_logits = {size: symbol for symbol, size in model.traced.size_symbols.items()}["num_logits"]
        assert num_logits in map(str, norm.meta["example_value"].shape)
        if through and name not in MOE:
            sizes = {str(size) for each in model.nodes_after_attention() for size in _shape(each)}
            assert sizes <= {num_logits, *map(str, range(1000))}


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "phi3", "qwen3-moe"])
def test_no_more_pieces_are_compiled(name: str) -> None:
    """Those of the middle layers stay as they are; the end of the last layer joins the piece of the logits."""
    before = family(name, torch.bfloat16, 6)
    before.apply(EliminateNoops())
    after = family(name, torch.bfloat16, 6)
    after.apply(EliminateNoops(), SelectRowsEarly())
    old, new = before.unique_pieces(), after.unique_pieces()
    assert len(new) == len(old) - (name not in MOE)
    shared = {piece.key for piece in old if len(piece.pieces) > 1}
    assert shared and shared <= {piece.key for piece in new}
