"""A sum over the ranks becomes part of the norm behind it; where it does not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.fuse_all_reduce import FuseAllReduce
from piecegraph.passes.matching.graph_pass import PassResult
from tests.passes.family_runs import family_of_rank, prompt
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import calls, graph_of, run, text
from tests.runner.tensor_parallel.ranks_in_threads import ThreadGroup, run_ranks

Tensor = torch.Tensor
EPS = 1e-5
X, RESIDUAL = torch.randn(3, 16), torch.randn(3, 16)
WEIGHT, SCALE = torch.randn(16, 16), torch.randn(16)


def all_reduce(x: Tensor) -> Tensor:
    result: Tensor = torch.ops.piecegraph.all_reduce.default(x)
    return result


def add_norm(x: Tensor, residual: Tensor, scale: Tensor | None = None) -> Any:
    return torch.ops.piecegraph.add_rms_norm.default(x, residual, scale, EPS, 0.0)


def block(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    normed, total = add_norm(residual, all_reduce(F.linear(x, weight)), scale)
    return normed, total


def block_with_a_linear(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    added = all_reduce(F.linear(x, weight).view(3, 16))
    made, total = torch.ops.piecegraph.add_norm_linear.default(added, residual, scale, EPS, 0.0, weight, None, "")
    return made, total


def block_of_experts(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """Experts compute `[num_tokens, size]`, and what is added to has a dim more."""
    added = all_reduce(F.linear(x, weight)).reshape(1, 3, 16)
    normed, total = add_norm(residual[None], added, scale)
    return normed, total


def traced(function: Callable[..., Any]) -> fx.Graph:
    """Return the graph with its values, which one rank alone computes."""
    return run_ranks(1, lambda group: graph_of(function, X, RESIDUAL, WEIGHT, SCALE))[0]


def fuse(graph: fx.Graph, is_split_op: Callable[[fx.Node], bool] = lambda node: False) -> PassResult:
    result = run_ranks(1, lambda group: FuseAllReduce().apply(graph, FakeContext(graph, is_split_op)))[0]
    graph.lint()
    return result


def test_a_sum_and_its_norm_in_text() -> None:
    graph = traced(block)
    assert text(graph) == [
        "linear = linear(x, weight)",
        "all_reduce_default = all_reduce(linear)",
        "add_rms_norm_default = add_rms_norm(residual, all_reduce_default, scale, 1e-05, 0.0)",
        "getitem = getitem(add_rms_norm_default, 0)",
        "getitem_1 = getitem(add_rms_norm_default, 1)",
        "return ((getitem, getitem_1))",
    ]
    assert fuse(graph) == PassResult(matches=1)
    assert text(graph) == [
        "linear = linear(x, weight)",
        "all_reduce_add_rms_norm_default = all_reduce_add_rms_norm(linear, residual, scale, 1e-05, 0.0)",
        "getitem = getitem(all_reduce_add_rms_norm_default, 0)",
        "getitem_1 = getitem(all_reduce_add_rms_norm_default, 1)",
        "return ((getitem, getitem_1))",
    ]


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (block, "all_reduce_add_rms_norm"),
        (block_of_experts, "all_reduce_add_rms_norm"),
        (block_with_a_linear, "all_reduce_add_norm_linear"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_get_the_bits_that_they_got(function: Callable[..., Any], fused: str, dtype: torch.dtype) -> None:
    """Each rank adds another tensor, and what it was given stays as it was."""
    before, after = traced(function), traced(function)
    assert fuse(after).matches == 1
    assert fused in calls(after) and "all_reduce" not in calls(after)

    def compute(group: ThreadGroup) -> None:
        given = [each.to(dtype) for each in (X * (group.rank + 1), RESIDUAL, WEIGHT, SCALE)]
        kept = [each.clone() for each in given]
        for one, other in zip(run(after, *given), run(before, *given), strict=True):
            assert torch.equal(one, other)
        assert all(map(torch.equal, given, kept))
        assert group.num_collectives == 2

    run_ranks(2, compute)


def test_a_sum_of_other_strides_is_copied() -> None:
    """The group adds up contiguous memory only."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return add_norm(all_reduce(F.linear(weight, x).t()), residual, scale)[0]

    before, after = traced(function), traced(function)
    assert fuse(after).matches == 1

    def compute(group: ThreadGroup) -> None:
        given = (X * (group.rank + 1), RESIDUAL, WEIGHT, SCALE)
        assert torch.equal(run(after, *given), run(before, *given))

    run_ranks(2, compute)


def alone(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return all_reduce(F.linear(x, weight))


def norm_first(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return torch.ops.piecegraph.rms_norm.default(all_reduce(F.linear(x, weight)), scale, EPS, 0.0) + residual


def two_readers(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    added = all_reduce(F.linear(x, weight))
    return add_norm(added, residual)[0], added * 2.0


def view_of_gaps(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """What is added up cannot be seen in that shape without a copy."""
    added = all_reduce(F.linear(weight, x).t()).reshape(1, 3, 16)
    return add_norm(added, residual[None])[0]


def view_of_bits(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """Numbers of another dtype add up otherwise."""
    added = all_reduce(F.linear(x, weight)).view(torch.float16)
    return add_norm(added, torch.cat([residual, residual], -1).half())[0]


def to_itself(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    added = all_reduce(F.linear(x, weight))
    return add_norm(added, added)[0]


def an_input(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return add_norm(all_reduce(x), residual)[0]


def a_view_of_an_input(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return add_norm(all_reduce(weight[:3]), residual)[0]


def read_elsewhere(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    part = F.linear(x, weight)
    return add_norm(all_reduce(part), residual)[0], part


def view_read_elsewhere(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    part = F.linear(x, weight)
    return add_norm(all_reduce(part.view(3, 16)), residual)[0], part.relu()


def one_of_two_parts(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    one, other = F.linear(x, torch.cat([weight, weight])).chunk(2, -1)
    return add_norm(all_reduce(one), residual)[0], other


def scale_of_itself(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return add_norm(residual, residual, all_reduce(F.linear(x, weight)[0]))[0]


WANTED = "; wanted is add_rms_norm, add_rms_norm_rounded or add_norm_linear"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            alone,
            "all_reduce_default is read by output" + WANTED,
        ),
        (
            norm_first,
            "all_reduce_default is read by rms_norm_default" + WANTED,
        ),
        (two_readers, "all_reduce_default is read by add_rms_norm_default, mul; wanted is one residual add and norm"),
        (
            view_of_gaps,
            "all_reduce_default is read by reshape" + WANTED,
        ),
        (
            view_of_bits,
            "all_reduce_default is read by view" + WANTED,
        ),
        (to_itself, "add_rms_norm_default adds all_reduce_default to itself"),
        (an_input, "x is an input of the graph, which the sum would overwrite"),
        (a_view_of_an_input, "weight is an input of the graph, which the sum would overwrite"),
        (read_elsewhere, "linear, which the sum would overwrite, is read by output, too"),
        (view_read_elsewhere, "linear, which the sum would overwrite, is read by relu, too"),
        (one_of_two_parts, "chunk, which the sum would overwrite, is read by getitem_1, too"),
        (scale_of_itself, "add_rms_norm_default reads all_reduce_default as another argument than a summand"),
    ],
)
def test_a_miss_says_why(function: Callable[..., Any], reason: str) -> None:
    graph = traced(function)
    before = str(graph)
    result = fuse(graph)
    assert result.matches == 0
    assert [miss.reason for miss in result.misses] == [reason]
    assert str(graph) == before


def test_a_cut_between_is_a_miss() -> None:
    """The tensor that is overwritten would be an input of a piece."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        part = F.linear(x, weight)
        cut = torch.relu(x)
        return add_norm(all_reduce(part), residual)[0], cut

    graph = traced(function)
    result = fuse(graph, lambda node: node.target is torch.relu)
    reason = "the graph is cut at relu, between what is added up and add_rms_norm_default"
    assert (result.matches, [miss.reason for miss in result.misses]) == (0, [reason])


def test_an_embedding_is_no_site() -> None:
    """Nothing is added to it before the first norm, so that `expect` may ask for all others."""

    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        index = x[:, 0].argsort()
        return all_reduce((F.embedding(index, weight) * scale).masked_fill((index < 1).unsqueeze(-1), 0.0)) * 2.0

    assert fuse(traced(function)) == PassResult()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_two_ranks_of_a_family_compute_the_same_logits(name: str) -> None:
    before = [family_of_rank(name, torch.float32, rank, 2) for rank in range(2)]
    after = [family_of_rank(name, torch.float32, rank, 2) for rank in range(2)]
    for family in before:
        family.apply(EliminateNoops(), FuseAddRMSNorm())
    for family in after:
        *_, outcome = family.apply(EliminateNoops(), FuseAddRMSNorm(), FuseAllReduce())
        assert (outcome.matches, outcome.misses) == (4, ())  # two a layer

    def compute(group: ThreadGroup) -> None:
        found, expected = (each[group.rank].logits(prompt(7), [6]) for each in (after, before))
        assert torch.equal(found, expected)

    run_ranks(2, compute)
