"""A token's choice of experts becomes one op; where it does not, the reason is said."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.moe.fuse_moe import FuseMoe
from piecegraph.passes.moe.fuse_routing import FuseRouting
from piecegraph.passes.ops.moe.routing import ROUTE_TOKENS
from tests.passes.family_runs import family
from tests.passes.family_runs import prompt as prompt_of
from tests.passes.traced_family import traced_family

IS_NORMALISED = {"qwen3-moe": False, "mixtral": True}
"""Families whose routing the op computes, both in two layers, and whether they divide by the sum."""


def named(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [node for node in graph.nodes if getattr(node.target, "__name__", node.target) in names]


@pytest.mark.parametrize("name", IS_NORMALISED)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_every_layer_matches_and_computes_the_same(name: str, dtype: torch.dtype) -> None:
    whole, fused = family(name, dtype), family(name, dtype)
    _, outcome = fused.apply(FuseMoe(), FuseRouting())
    assert (outcome.matches, outcome.misses) == (2, ())
    assert not named(fused.graph, "softmax", "topk", "itruediv")
    for node in [node for node in fused.graph.nodes if node.target is ROUTE_TOKENS]:
        _, top_k, is_normalised, rounded_to = node.args
        assert (top_k, is_normalised) == (2, IS_NORMALISED[name])
        assert rounded_to == (torch.float32 if name == "mixtral" else dtype)
    whole.apply(FuseMoe())
    tokens = prompt_of(11)
    assert torch.equal(fused.logits(tokens, [10, 3]), whole.logits(tokens, [10, 3]))


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_routing_of_another_kind_is_no_site(name: str) -> None:
    """DeepSeek's is a sigmoid with groups; gpt-oss has its softmax behind the choice."""
    graph, context = traced_family(name, torch.bfloat16)
    assert FuseRouting().apply(graph, context) == PassResult(0)


def first(graph: fx.Graph, name: str) -> fx.Node:
    return named(graph, name)[0]


def _read_probabilities(graph: fx.Graph) -> None:
    with graph.inserting_before(first(graph, "topk")):
        graph.call_method("sum", (first(graph, "softmax"),))


def _read_both(graph: fx.Graph) -> None:
    with graph.inserting_after(first(graph, "topk")):
        graph.call_function(len, (first(graph, "topk"),))


def _smallest(graph: fx.Graph) -> None:
    first(graph, "topk").kwargs = {"dim": -1, "largest": False}


def _over_tokens(graph: fx.Graph) -> None:
    softmax = first(graph, "softmax")
    softmax.kwargs = {**softmax.kwargs, "dim": 0}


def _changed(graph: fx.Graph) -> None:
    """The logits, behind the cast that copied them for the softmax."""
    (cast,) = first(graph, "softmax").all_input_nodes
    (logits,) = cast.all_input_nodes
    with graph.inserting_before(first(graph, "topk")):
        graph.call_method("zero_", (logits,))


def _in_bfloat16(graph: fx.Graph) -> None:
    softmax = first(graph, "softmax")
    softmax.meta["example_value"] = softmax.meta["example_value"].bfloat16()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_probabilities, "is read by others than topk"),
        (_read_both, "are not its values and its indices"),
        (_smallest, "does not take the largest of the last dim"),
        (_over_tokens, "is not over the last of two dims"),
        (_in_bfloat16, "is torch.bfloat16; wanted is float32"),
        (_changed, "is changed in place by zero_, before topk is there"),
    ],
)
def test_a_miss_says_why_and_the_other_layer_matches(change: Callable[[fx.Graph], None], reason: str) -> None:
    graph, context = traced_family("mixtral", torch.bfloat16)
    change(graph)
    result = FuseRouting().apply(graph, context)
    graph.lint()
    assert result.matches == 1 and re.search(reason, result.misses[0].reason), result


def test_arguments_may_be_given_by_name() -> None:
    graph, context = traced_family("mixtral", torch.bfloat16)
    for name in ("softmax", "topk"):
        for node in named(graph, name):
            source, *others = node.args
            node.args = ()
            node.kwargs = {"input": source, **({"k": others[0]} if others else {}), **node.kwargs}
    assert FuseRouting().apply(graph, context) == PassResult(2)


def test_weights_that_something_else_reads_are_divided_apart() -> None:
    graph, context = traced_family("mixtral", torch.bfloat16)
    division = first(graph, "itruediv")
    division.target = operator.truediv
    with graph.inserting_after(division):
        graph.call_method("amax", (division.args[0],))
    assert FuseRouting().apply(graph, context) == PassResult(2)
    normalised = [node.args[2] for node in graph.nodes if node.target is ROUTE_TOKENS]
    assert normalised == [False, True] and division in graph.nodes
