"""Norms become one op however they are spelled; where one does not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_SIZE
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import calls, graph_of, run, text
from tests.passes.traced_family import merged_family
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensor = torch.Tensor


def inverse(wide: Tensor) -> Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * inverse(wide)).type_as(x)


def weight_last(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (inverse(wide) * wide).type_as(x) * weight


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * inverse(wide) * (1.0 + weight.float())).type_as(x)


def weight_before_the_cast(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (weight * (wide * inverse(wide))).type_as(x)


def x_times_x(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(dtype=torch.float32)
    scale = (EPS + (wide * wide).mean(dim=-1, keepdim=True)).rsqrt()
    return weight * (wide * scale).type_as(x)


def square_and_power(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return ((wide * torch.pow(torch.square(wide).mean((-1,), True) + EPS, -0.5)) * weight.float()).type_as(x)


def cast_twice(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * inverse(x.to(torch.float32))).type_as(x)


def no_weight(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * inverse(wide)).type_as(x)


def of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), weight, EPS)


def of_torch_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return weight * torch.rms_norm(x.float(), [16], eps=EPS).type_as(x)


def stays_wide(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return wide * inverse(wide) * weight.float()


SPELLINGS = [llama, weight_last, gemma, weight_before_the_cast, x_times_x, square_and_power, cast_twice, no_weight]
SPELLINGS += [of_torch, of_torch_in_float32]


def fuse(graph: fx.Graph, is_split_op: Callable[[fx.Node], bool] = lambda node: False) -> PassResult:
    result = FuseAddRMSNorm().apply(graph, FakeContext(graph, is_split_op))
    graph.lint()
    return result


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape or (3, 16)).to(dtype), (torch.randn((shape or (3, 16))[-1]) * 0.2).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """They round at different places."""
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_op(spelling: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, weight = inputs(dtype)
    graph = graph_of(spelling, x, weight)
    assert fuse(graph) == PassResult(matches=1)
    assert calls(graph) == ["rms_norm"]
    (norm,) = [node for node in graph.nodes if node.target is RMS_NORM]
    assert norm.args[2:] == (pytest.approx(EPS), 1.0 if spelling is gemma else 0.0)
    assert_close(run(graph, x, weight), spelling(x, weight))


def test_a_norm_in_float32_stays_in_float32() -> None:
    x, weight = inputs(torch.bfloat16)
    graph = graph_of(stays_wide, x, weight)
    assert fuse(graph).matches == 1
    assert calls(graph) == ["float", "rms_norm"]
    assert_close(run(graph, x, weight), stays_wide(x, weight))


def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return llama(total, weight), total


def test_a_residual_add_and_its_norm_in_text() -> None:
    x, weight = inputs(torch.bfloat16)
    graph = graph_of(block, x, x, weight)
    assert text(graph) == [
        "add = add(residual, x)",
        "to = to(add, torch.float32)",
        "pow_1 = pow(to, 2)",
        "mean = mean(pow_1, -1, keepdim=True)",
        "add_1 = add(mean, 1e-05)",
        "rsqrt = rsqrt(add_1)",
        "mul = mul(to, rsqrt)",
        "type_as = type_as(mul, add)",
        "mul_1 = mul(weight, type_as)",
        "return ((mul_1, add))",
    ]
    assert fuse(graph).matches == 1
    assert text(graph) == [
        "add_rms_norm_default = add_rms_norm(residual, x, weight, 1e-05, 0.0)",
        "getitem = getitem(add_rms_norm_default, 0)",
        "getitem_1 = getitem(add_rms_norm_default, 1)",
        "return ((getitem, getitem_1))",
    ]
    for found, expected in zip(run(graph, x, x, weight), block(x, x, weight), strict=True):
        assert_close(found, expected)


def test_a_sum_that_nobody_else_reads_is_part_of_the_op_too() -> None:
    x, weight = inputs(torch.float32)
    graph = graph_of(lambda x, residual, weight: gemma(x + residual, weight), x, x, weight)
    fuse(graph)
    assert calls(graph) == ["add_rms_norm", "getitem", "getitem"]


def sum_read_before(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    early = torch.relu(total)
    return llama(total, weight), early, total


def sum_read_in_float32(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    wide = (x + residual).float()
    return (wide * inverse(wide)).type_as(x) * weight, wide


def two_norms_of_a_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    return llama(total, weight), gemma(total, weight), total


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (sum_read_before, ["add", "relu", "rms_norm"]),
        (sum_read_in_float32, ["add", "float", "rms_norm"]),
        (two_norms_of_a_sum, ["add_rms_norm", "getitem", "getitem", "rms_norm"]),
    ],
)
def test_a_sum_that_is_wanted_earlier_stays(function: Callable[..., Any], expected: list[str]) -> None:
    x, weight = inputs(torch.bfloat16)
    graph = graph_of(function, x, x, weight)
    fuse(graph)
    assert calls(graph) == expected
    for found, wanted in zip(run(graph, x, x, weight), function(x, x, weight), strict=True):
        assert_close(found, wanted)


def test_a_summand_that_changes_before_the_norm_is_added_as_before() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        first = residual * 2.0
        total = x + first
        scale = inverse(total)
        first.mul_(3.0)
        return total * scale * weight, first

    x, weight = inputs(torch.float32)
    graph = graph_of(function, x, x, weight)
    assert fuse(graph).matches == 1
    assert calls(graph) == ["mul", "add", "mul_", "rms_norm"]
    for found, wanted in zip(run(graph, x, x, weight), function(x, x, weight), strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("other", [torch.ones(3, 16), torch.ones(16).bfloat16()], ids=["dtype", "shape"])
def test_operands_that_are_not_alike_are_added_as_before(other: Tensor) -> None:
    x, weight = inputs(torch.bfloat16)
    graph = graph_of(lambda x, other, weight: llama(x + other, weight), x, other, weight.to(x.dtype))
    assert fuse(graph).matches == 1
    assert calls(graph)[0] == "add" and ADD_RMS_NORM not in {node.target for node in graph.nodes}


def test_no_sum_is_drawn_across_a_split_op() -> None:
    """The norm's result would have to cross the cut."""
    x, weight = inputs(torch.bfloat16)

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = x + residual
        cut = torch.relu(x)
        return llama(total, weight), cut

    graph = graph_of(function, x, x, weight)
    assert fuse(graph, lambda node: node.target is torch.relu).matches == 1
    assert calls(graph) == ["add", "relu", "rms_norm"]


def test_heads_are_normed_beside_their_token() -> None:
    """Gemma 3 norms `[1, heads, tokens, head_dim]`: the swap moves behind the norm, and strides are as before."""
    x, weight = inputs(torch.bfloat16, 1, 5, 2, 8)
    graph = graph_of(lambda x, weight: gemma(x.transpose(1, 2), weight), x, weight)
    fuse(graph)
    assert calls(graph) == ["rms_norm", "transpose"]
    expected = gemma(x.transpose(1, 2), weight)
    assert_close(run(graph, x, weight), expected)
    assert run(graph, x, weight).stride() == expected.stride()


def epsilon_is_a_tensor(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight)


def no_mean(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def no_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def over_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS)


def cubed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS)


def second_reader(x: Tensor, weight: Tensor) -> Any:
    scale = inverse(x)
    return x * scale, scale


def scales_another(x: Tensor, weight: Tensor) -> Tensor:
    return weight * inverse(x)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * inverse(centred) * weight


def default_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), weight)


def over_two_dims(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (3, 16), eps=EPS)


def narrower(x: Tensor, weight: Tensor) -> Tensor:
    return (x * inverse(x)) * weight.double()


def written_between(x: Tensor, weight: Tensor) -> Any:
    scaled = x * 2.0
    scale = inverse(scaled)
    scaled.add_(1.0)
    return scaled * scale


def computed_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), weight * 2.0, EPS)


def written_weight(x: Tensor, weight: Tensor) -> Tensor:
    weight.mul_(2.0)
    return F.rms_norm(x, (16,), weight, EPS)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (epsilon_is_a_tensor, "its epsilon is not a constant but weight"),
        (no_mean, "it is the root of a sum of sum_1 and 1e-05; wanted is a mean of squares and an epsilon"),
        (no_epsilon, "it is the root of mean; wanted is a mean of squares plus an epsilon"),
        (over_rows, "mean is a mean over dim 0; wanted is the last alone"),
        (cubed, "it averages pow_1; wanted are squares"),
        (second_reader, "rsqrt has a second reader: mul, output"),
        (scales_another, "mul scales weight, but what was squared is x"),
        (layer_norm, "what is squared is a difference, sub: a norm that takes the mean off (LayerNorm)"),
        (default_epsilon, "its epsilon is not a constant but None"),
        (over_two_dims, "it norms over the dims (3, 16); wanted is the last alone"),
        (written_between, "mul is changed in place by add_, before mul_1 is there"),
        (computed_weight, "its weight mul is computed here; wanted is an input that nothing changes"),
        (written_weight, "its weight weight is computed here; wanted is an input that nothing changes"),
        (narrower, "mul_1 is torch.float64, which none of x (torch.float32), x (torch.float32), x (torch.float32) is"),
    ],
)
def test_a_miss_says_why(function: Callable[..., Any], reason: str) -> None:
    x, weight = inputs(torch.float32)
    graph = graph_of(function, x, weight)
    before = str(graph)
    result = fuse(graph)
    assert result.matches == 0
    assert [miss.reason for miss in result.misses] == [reason]
    assert str(graph) == before


def test_rows_too_long_for_the_kernel_are_a_miss() -> None:
    """The pass reports a miss, instead of an error when the model runs."""
    for size, matches in ((MAX_NORM_SIZE, 1), (MAX_NORM_SIZE + 1, 0)):
        graph = graph_of(lambda x: x * inverse(x), torch.ones(2, size))
        result = fuse(graph)
        assert result.matches == matches
        reasons = [f"rows of x have {size} numbers; the kernel takes up to {MAX_NORM_SIZE}"] * (1 - matches)
        assert [miss.reason for miss in result.misses] == reasons


def test_a_weight_that_the_graph_computes_multiplies_after_the_op() -> None:
    """The kernel reads weights before the preceding kernel has ended."""
    x, weight = inputs(torch.float32)
    graph = graph_of(lambda x, weight: llama(x, weight * 2.0), x, weight)
    assert fuse(graph).matches == 1
    assert calls(graph) == ["mul", "rms_norm", "mul"]
    assert_close(run(graph, x, weight), llama(x, weight * 2.0))


NORMS = {  # rms_norm, add_rms_norm
    "llama": (1, 4),  # two a layer and the last; before the first nothing is added
    "llama3-rope": (1, 4),
    "llama-yarn": (1, 4),
    "mistral": (1, 4),
    "qwen2": (1, 4),
    "qwen2-sliding": (1, 4),
    "qwen3": (5, 4),  # and query's and key's of each layer
    "gemma2": (5, 4),  # four a layer, two of them before the add
    "gemma3": (13, 6),  # six a layer, of three
    "phi3": (1, 4),
    "phi3-longrope-short": (1, 4),
    "phi3-longrope-long": (1, 4),
    "gpt-neox": (0, 0),  # LayerNorm
    "opt": (0, 0),
    "qwen3-moe": (5, 4),
}


def assert_norms(name: str, dtype: torch.dtype, expected: tuple[int, int]) -> None:
    graph, context = merged_family(name, dtype)
    result = FuseAddRMSNorm().apply(graph, context)
    graph.lint()
    targets = [node.target for node in graph.nodes]
    assert (targets.count(RMS_NORM), targets.count(ADD_RMS_NORM)) == expected
    assert result == PassResult(matches=sum(expected))
    assert not {"rsqrt"} & set(calls(graph))


@pytest.mark.parametrize("name", families(FAMILIES))
def test_every_norm_of_a_model_family_matches(name: str) -> None:
    assert_norms(name, torch.bfloat16, NORMS[name])


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32], ids=str)
def test_norms_of_a_family_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    assert_norms(name, dtype, NORMS[name])


@pytest.mark.parametrize(("name", "misses"), [("cohere", 3), ("starcoder2", 0)])
def test_layer_norms_are_missed_out_loud_where_they_are_spelled_out(name: str, misses: int) -> None:
    graph, context = merged_family(name, torch.bfloat16)
    result = FuseAddRMSNorm().apply(graph, context)
    assert result.matches == 0
    assert all("LayerNorm" in miss.reason for miss in result.misses)
    assert len(result.misses) == misses
