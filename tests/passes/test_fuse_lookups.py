"""Rows taken by their numbers become one op; where they do not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_lookups import FuseLookups
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.take_rows import TAKE_ROWS
from piecegraph.passes.select_rows_early import SelectRowsEarly
from tests.passes.family_runs import family, prompt
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import calls, graph_of, run
from tests.passes.traced_family import traced_family
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES

Tensor = torch.Tensor
INDEX = torch.tensor([3, 0, 3, 1])
TABLE, HIDDEN = torch.randn(5, 48), torch.randn(1, 5, 48)


def fuse(graph: fx.Graph) -> PassResult:
    result = FuseLookups().apply(graph, FakeContext(graph))
    graph.lint()
    return result


SPELLINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "an embedding": (lambda x, i: F.embedding(i, x), TABLE),
    "with padding, which is the gradient's": (lambda x, i: F.embedding(i, x, padding_idx=0), TABLE),
    "of two dims": (lambda x, i: F.embedding(i[None], x), TABLE),
    "rows": (lambda x, i: x[i], TABLE),
    "rows of a batch of one": (lambda x, i: x[:, i, :], HIDDEN),
    "all that is behind": (lambda x, i: x[:, i], HIDDEN),
    "ellipsis": (lambda x, i: x.view(1, 5, 3, 16)[..., i, :, :].flatten(2), HIDDEN),  # of all that is ahead, one
    "index_select": (lambda x, i: torch.index_select(x, 1, i), HIDDEN),
    "the method, from the end": (lambda x, i: x.index_select(-2, i), HIDDEN),
    "an embedding of numbers that are computed": (lambda x, i: F.embedding(i.int() + 1, x), TABLE),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_lookup_matches_however_it_is_spelled(name: str) -> None:
    function, source = SPELLINGS[name]
    graph = graph_of(function, source, INDEX)
    expected = run(graph, source, INDEX)
    assert fuse(graph) == PassResult(1)
    assert "take_rows" in calls(graph)
    assert torch.equal(run(graph, source, INDEX), expected)


def test_one_call_takes_the_same_rows_of_several_tensors() -> None:
    """Their sources must be there when the first is taken; others follow by themselves."""

    def function(x: Tensor, y: Tensor, i: Tensor) -> Any:
        one, other = x[:, i], y[:, i]
        return one, other, one.sin()[:, i], x[0][i]

    inputs = (HIDDEN, HIDDEN * 2, INDEX)
    graph = graph_of(function, *inputs)
    expected = run(graph, *inputs)
    assert fuse(graph).matches == 4
    taken = [len(node.args[0]) for node in graph.nodes if node.target is TAKE_ROWS]
    assert taken == [2, 1, 1]
    for one, other in zip(run(graph, *inputs), expected, strict=True):
        assert torch.equal(one, other)


def test_a_lookup_in_what_was_looked_up() -> None:
    """The sampled rows of a model of one layer, whose residual is the embedding, are such a lookup."""

    def function(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return F.embedding(i, x)[j][j].index_select(0, j)

    inputs = (TABLE, INDEX, torch.tensor([2, 0, -1]) % 3)
    graph = graph_of(function, *inputs)
    expected = run(graph, *inputs)
    assert fuse(graph).matches == 4
    assert calls(graph).count("take_rows") == 4
    assert torch.equal(run(graph, *inputs), expected)


def test_a_model_of_one_layer() -> None:
    model = family("llama", torch.float32, 1)
    expected = model.logits(prompt(6), [5, 0])
    for outcome in model.apply(EliminateNoops(), SelectRowsEarly(), FuseLookups()):
        assert not outcome.error, outcome
    assert outcome.matches == 3
    torch.testing.assert_close(model.logits(prompt(6), [5, 0]), expected, rtol=1e-4, atol=1e-4)


def test_what_is_changed_between_is_taken_by_itself() -> None:
    def function(x: Tensor, y: Tensor, i: Tensor) -> Any:
        one = x[i]
        y.mul_(2)
        return one, y[i]

    graph = graph_of(function, TABLE.clone(), TABLE.clone(), INDEX)
    assert fuse(graph).matches == 2
    one, other = run(graph, TABLE.clone(), TABLE.clone(), INDEX)
    assert torch.equal(one, TABLE[INDEX]) and torch.equal(other, TABLE[INDEX] * 2)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "a table that it changes": (lambda x, i: F.embedding(i, x, max_norm=1.0), TABLE, "max_norm"),
    "rows of a batch": (lambda x, i: x[:, i], HIDDEN.expand(2, 5, 48), "dims ahead"),
    "bits": (lambda x, i: (x > 0)[i], TABLE, "bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_linear_that_no_kernel_takes_is_a_miss_with_a_reason(name: str) -> None:
    function, source, reason = REFUSED[name]
    result = fuse(graph_of(function, source, INDEX))
    assert result.matches == 0
    assert [reason in miss.reason for miss in result.misses] == [True]


NO_SITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mask": lambda x, i: x[x[:, 0] > 0],
    "two indices": lambda x, i: x[i, i],
    "columns": lambda x, i: x[:, 2:40],
    "an item": lambda x, i: x.chunk(2, -1)[0],
    "single numbers": lambda x, i: x[:, 0][i],
    "one row, whose dim stays": lambda x, i: torch.index_select(x, 0, i[0]),
    "numbers that are computed": lambda x, i: x[i + 1],
}


@pytest.mark.parametrize("name", NO_SITES)
def test_calls_that_are_not_lookups_are_not_misses(name: str) -> None:
    assert fuse(graph_of(NO_SITES[name], TABLE, INDEX)) == PassResult()


@pytest.mark.parametrize("name", families(FAMILIES))
def test_the_embedding_and_the_sampled_rows_of_a_model_match(name: str) -> None:
    graph, context = traced_family(name, torch.bfloat16)
    result = FuseLookups().apply(graph, context)
    graph.lint()
    assert result.matches >= 2
    assert not [call for call in calls(graph) if call == "embedding"]
