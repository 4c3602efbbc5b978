"""Rotary embedding becomes part of attention where int8 linears project the query, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR
from piecegraph.passes.rotary.fuse_int8_rope import FuseInt8Rope
from piecegraph.passes.rotary.fuse_rope_kv_write import FuseRopeKVWrite
from tests.passes.pass_context import FakeContext
from tests.passes.rotary.test_fuse_rope_kv_write import SPLIT_OPS, NoContext, attend, heads, rotated
from tests.passes.spelled import calls, graph_of

Tensor = torch.Tensor
X, COS, SIN = torch.randn(1, 5, 16), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
FLOATS, INTEGERS, SCALE = torch.randn(64, 16), torch.randint(-9, 9, (64, 16), dtype=torch.int8), torch.rand(64)


@pytest.fixture(autouse=True)
def _attention_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded by running them; there is no cache here."""
    monkeypatch.setattr("piecegraph.runner.attention.interface.op.get_forward_context", NoContext)


def attention_of(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    return F.silu(attend(rotated(q, cos, sin), rotated(k, cos, sin), v))


def of_int8(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return attention_of(INT8_LINEAR(x, weight, scale, None), cos, sin)


def of_floats(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    return attention_of(F.linear(x, weight), cos, sin)


def of_both(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    return of_int8(x, cos, sin, weight, scale) + attention_of(F.linear(x, other), cos, sin)


def context(graph: torch.fx.Graph) -> FakeContext:
    return FakeContext(graph, lambda node: node.target in SPLIT_OPS)


def attention_calls(graph: torch.fx.Graph) -> list[str]:
    return [name for name in calls(graph) if name.endswith("attention")]


def test_queries_of_int8_linears_are_rotated_by_attention() -> None:
    graph = graph_of(of_int8, X, COS, SIN, INTEGERS, SCALE)
    result = FuseInt8Rope().apply(graph, context(graph))
    assert (result.matches, result.misses) == (1, ()) and attention_calls(graph) == ["rope_attention"]
    assert "cat" not in calls(graph) and "neg" not in calls(graph)


def test_other_queries_are_no_sites() -> None:
    """Inductor rotates them, in the code that it generates anyway."""
    graph = graph_of(of_floats, X, COS, SIN, FLOATS)
    assert FuseInt8Rope().apply(graph, context(graph)).matches == 0
    graph = graph_of(of_both, X, COS, SIN, INTEGERS, SCALE, FLOATS)
    result = FuseInt8Rope().apply(graph, context(graph))
    assert (result.matches, result.misses) == (1, ())
    assert attention_calls(graph) == ["rope_attention", "attention"]


def test_a_graph_without_silu_has_no_sites() -> None:
    def with_gelu(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = INT8_LINEAR(x, weight, scale, None)
        q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
        return F.gelu(attend(rotated(q, cos, sin), rotated(k, cos, sin), v))

    graph = graph_of(with_gelu, X, COS, SIN, INTEGERS, SCALE)
    assert FuseInt8Rope().apply(graph, context(graph)).matches == 0 and attention_calls(graph) == ["attention"]


def test_what_is_left_over_the_general_pass_takes() -> None:
    graph = graph_of(of_both, X, COS, SIN, INTEGERS, SCALE, FLOATS)
    assert FuseRopeKVWrite().apply(graph, context(graph)).matches == 2
    assert attention_calls(graph) == ["rope_attention", "rope_attention"]


def test_a_site_that_does_not_match_is_a_miss() -> None:
    def another_sine(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = INT8_LINEAR(x, weight, scale, None)
        q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
        return F.silu(attend(rotated(q, cos, sin), rotated(k, cos, cos), v))

    graph = graph_of(another_sine, X, COS, SIN, INTEGERS, SCALE)
    result = FuseInt8Rope().apply(graph, context(graph))
    (miss,) = result.misses
    assert result.matches == 0 and miss.reason.startswith("query is rotated by")
