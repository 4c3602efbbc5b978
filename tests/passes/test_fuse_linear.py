"""The linears that take our op, and those that stay torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.fuse_linear import FuseLinear
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.linear import LINEAR
from tests.passes import spelled
from tests.passes.pass_context import FakeContext


def graph_of(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, read_twice: bool = False
) -> fx.Graph:
    """A linear over `[3, size]`, perhaps its gated activation, perhaps returned beside it."""
    graph = fx.Graph()
    values = {"x": torch.randn(3, weight.shape[1], dtype=weight.dtype), "weight": weight, "bias": bias}
    nodes = {}
    for name, value in values.items():
        if value is not None:
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["example_value"] = value
    linear = graph.call_function(F.linear, (nodes["x"], nodes["weight"], nodes.get("bias")))
    linear.meta["example_value"] = F.linear(values["x"], weight, bias)  # type: ignore[arg-type]
    result = linear
    if gated:
        result = graph.call_function(ACT_MUL, (linear, "silu"))
        result.meta["example_value"] = ACT_MUL(linear.meta["example_value"], "silu")
    graph.output((result, linear) if read_twice else (result,))
    return graph


def fused(graph: fx.Graph) -> tuple[PassResult, list[object]]:
    """The pass' result, and what the graph calls afterwards. Results of the graph stay what they were."""
    inputs = [node.meta["example_value"] for node in graph.nodes if node.op == "placeholder"]
    before = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*inputs)
    result = FuseLinear().apply(graph, FakeContext(graph))
    graph.lint()
    after = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*inputs)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old)
    return result, [node.target for node in graph.nodes if node.op == "call_function"]


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16) / 16


def test_a_linear_becomes_the_op_of_ours() -> None:
    assert fused(graph_of(half(32, 128), half(32))) == (PassResult(1), [LINEAR])


@pytest.mark.parametrize("columns", [1, 4])
def test_a_linear_of_a_few_columns_does_too(columns: int) -> None:
    """Such as the gate of a shared expert, whatever its size."""
    assert fused(graph_of(half(columns, 100), half(columns))) == (PassResult(1), [LINEAR])


def test_a_gated_activation_becomes_part_of_it() -> None:
    assert fused(graph_of(half(64, 128), gated=True)) == (PassResult(1), [LINEAR])


def test_an_activation_after_its_input_has_changed_stays() -> None:
    weight = half(64, 128)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        doubled = x * 2.0
        both = F.linear(doubled, weight)
        doubled.mul_(0.0)
        return torch.ops.piecegraph.act_mul.default(both, "silu") + doubled[:, :32]

    graph = spelled.graph_of(function, half(3, 128), weight)
    assert FuseLinear().apply(graph, FakeContext(graph)) == PassResult(1)
    assert spelled.calls(graph) == ["mul", "linear", "mul_", "act_mul", "getitem", "add"]


EPS = 1e-6


def norm_ahead(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed, total = torch.ops.piecegraph.add_rms_norm.default(x, residual, None, EPS, 0.0)
    doubled = total * 2.0
    gate_up = F.linear(normed, weight)
    return torch.cat([torch.ops.piecegraph.act_mul.default(gate_up, "silu"), doubled, total], -1)


def test_a_norm_that_a_linear_alone_reads_becomes_part_of_it() -> None:
    """The sum is there as early as it was, for whoever reads it."""
    inputs = half(3, 128), half(3, 128), half(64, 128)
    graph = spelled.graph_of(norm_ahead, *inputs)
    before = norm_ahead(*inputs)
    assert FuseLinear().apply(graph, FakeContext(graph)) == PassResult(1)
    graph.lint()
    assert spelled.calls(graph) == ["add_norm_linear", "getitem", "getitem", "mul", "cat"]
    torch.testing.assert_close(spelled.run(graph, *inputs), before)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_linear_before_a_fused_norm_joins_it(is_first: bool) -> None:
    """Whichever of the two it is."""

    def function(
        x: torch.Tensor, residual: torch.Tensor, down: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        made = F.linear(x, down, bias)
        added = (made, residual) if is_first else (residual, made)
        normed, total = torch.ops.piecegraph.add_rms_norm.default(*added, None, EPS, 0.0)
        return F.linear(normed, weight) + total

    inputs = half(3, 192), half(3, 128), half(128, 192), half(128), half(128, 128)
    graph = spelled.graph_of(function, *inputs)
    before = function(*inputs)
    assert FuseLinear().apply(graph, FakeContext(graph)) == PassResult(2)
    graph.lint()
    assert spelled.calls(graph) == ["linear_add_norm_linear", "getitem", "getitem", "add"]
    torch.testing.assert_close(spelled.run(graph, *inputs), before, atol=2e-2, rtol=2e-2)


def test_the_linear_before_a_norm_stays_if_others_read_it_or_its_input_changes() -> None:
    def read(x: torch.Tensor, residual: torch.Tensor, down: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = F.linear(x, down)
        normed, total = torch.ops.piecegraph.add_rms_norm.default(made, residual, None, EPS, 0.0)
        return F.linear(normed, weight) + total + made

    def changed(x: torch.Tensor, residual: torch.Tensor, down: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = F.linear(x, down)
        x.add_(1.0)
        normed, total = torch.ops.piecegraph.add_rms_norm.default(made, residual, None, EPS, 0.0)
        return F.linear(normed, weight) + total

    for function in (read, changed):
        inputs = half(3, 192), half(3, 128), half(128, 192), half(128, 128)
        graph = spelled.graph_of(function, *inputs)
        assert FuseLinear().apply(graph, FakeContext(graph)) == PassResult(2)
        assert {"linear", "add_norm_linear"} <= set(spelled.calls(graph))


def test_a_norm_that_others_read_too_stays() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed, total = torch.ops.piecegraph.add_rms_norm.default(x, residual, None, EPS, 0.0)
        return F.linear(normed, weight) + normed + total

    graph = spelled.graph_of(function, half(3, 128), half(3, 128), half(128, 128))
    assert FuseLinear().apply(graph, FakeContext(graph)) == PassResult(1)
    assert "linear" in spelled.calls(graph) and "add_rms_norm" in spelled.calls(graph)


@pytest.mark.parametrize("how", ["computed", "changed", "with gaps"])
def test_a_norm_whose_weight_is_not_there_before_the_kernels_stays(how: str) -> None:
    """The joint kernel reads the weight while the preceding kernel may still run."""

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if how == "changed":
            scale.add_(1)
        factor = {"computed": scale + 1, "changed": scale, "with gaps": scale[::2]}[how]
        normed, total = torch.ops.piecegraph.add_rms_norm.default(x, residual, factor, EPS, 0.0)
        return F.linear(normed, weight) + total

    inputs = half(1, 64), half(1, 64), half(64, 64), half(128 if how == "with gaps" else 64)
    graph = spelled.graph_of(function, *inputs)
    FuseLinear().apply(graph, FakeContext(graph))
    assert {"linear", "add_rms_norm"} <= set(spelled.calls(graph))


def test_a_norm_whose_linears_bias_is_changed_after_it_stays() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed, total = torch.ops.piecegraph.add_rms_norm.default(x, residual, None, EPS, 0.0)
        bias.add_(1.0)
        return F.linear(normed, weight, bias) + total

    graph = spelled.graph_of(function, half(3, 128), half(3, 128), half(128, 128), half(128))
    FuseLinear().apply(graph, FakeContext(graph))
    assert "add_rms_norm" in spelled.calls(graph)


def missed(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[str]:
    graph = spelled.graph_of(function, *inputs)
    return [miss.reason for miss in FuseLinear().apply(graph, FakeContext(graph)).misses]


def test_operands_that_the_kernels_cannot_read_are_a_miss() -> None:
    x, weight = half(3, 128), half(32, 128)
    computed = "its weight mul is computed here; wanted is an input that nothing changes"
    assert missed(lambda x, weight: F.linear(x, weight * 2.0), x, weight) == [computed]
    assert missed(lambda x, weight: F.linear(x, weight[:16]), x, weight) == []  # a view of one is there as well
    gaps = "its bias has the shape [32]; wanted is [32], without gaps"
    assert missed(lambda x, weight, bias: F.linear(x, weight, bias[::2]), x, weight, half(64)) == [gaps]
    short = "its bias has the shape [1]; wanted is [32], without gaps"
    assert missed(lambda x, weight, bias: F.linear(x, weight, bias), x, weight, half(1)) == [short]
    assert missed(lambda x, vector: F.linear(x, vector), x, half(128)) == ["its weight has 1 dims; wanted are 2"]


def test_an_activation_whose_linear_is_read_elsewhere_stays() -> None:
    assert fused(graph_of(half(64, 128), gated=True, read_twice=True)) == (PassResult(1), [LINEAR, ACT_MUL])


def test_float32_linears_are_no_sites() -> None:
    assert fused(graph_of(torch.randn(32, 128))) == (PassResult(0), [F.linear])


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (half(32, 100), "its weight is 32 x 100; the kernels take multiples of 16 x 64"),
        (half(20, 128), "its weight is 20 x 128"),
        (half(128, 32).t(), "strides"),
    ],
)
def test_a_miss_says_why(weight: torch.Tensor, reason: str) -> None:
    result, calls = fused(graph_of(weight))
    (miss,) = result.misses
    assert reason in miss.reason
    assert calls == [F.linear]
