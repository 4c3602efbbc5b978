"""Linears over one input become one; which, is read off the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from piecegraph.passes.merge_projections import MergeProjections
from piecegraph.passes.ops.quantised.int4_tiles_linear import INT4_TILES_LINEAR
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR
from tests.passes.pass_context import FakeContext
from tests.passes.relative_error import Tensors, assert_no_less_exact, quick_and_all
from tests.passes.spelled import calls, graph_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 3, 5, 16, 33, 64, 65, 130)
PROJECTIONS = [
    (64, (64, 32, 32)), (64, (64, 64, 64)), (128, (64, 16, 16)), (256, (64, 32, 32)), (80, (80, 80, 80)),
    (96, (48, 16, 16)), (100, (60, 20, 20)), (24, (27, 9, 9)), (192, (24, 24, 24)),
    (64, (96, 96)), (128, (40, 40)), (72, (56, 56)),
]  # fmt: skip
"""The size of what they read and their columns: query, key and value; gate and up."""

SHAPES = [(rows, size, *columns) for rows in ROWS for size, columns in PROJECTIONS]


def placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def call(graph: fx.Graph, function: Callable[..., torch.Tensor], *operands: fx.Node) -> fx.Node:
    """With the value it has, as in a traced graph."""
    node = graph.call_function(function, operands)
    node.meta["example_value"] = function(*(each.meta["example_value"] for each in operands))
    return node


class Projections(nn.Module):
    """Three linears over `x` before a barrier, one after it, and one over something else."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in (6, 4, 2, 6))

    def graph(self) -> fx.Graph:
        graph = fx.Graph()
        x = placeholder(graph, "x", torch.zeros(5, 8))
        weights = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weights += [placeholder(graph, f"{name}_{i}", tensor) for name, tensor in layer.named_parameters()]
        each = len(weights) // len(self.layers)
        own = [tuple(weights[i * each : (i + 1) * each]) for i in range(len(self.layers))]
        outs = [call(graph, F.linear, x, *own[i]) for i in range(3)]
        barrier = call(graph, torch.relu, outs[0])
        outs.append(call(graph, F.linear, x, *own[3]))
        graph.output((*outs, barrier))
        return graph


def is_barrier(node: fx.Node) -> bool:
    return node.target is torch.relu


def run(graph: fx.Graph, x: torch.Tensor) -> list[torch.Tensor]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = [x if node.name == "x" else node.meta["example_value"] for node in placeholders]
    return list(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs))


def merge(graph: fx.Graph) -> list[tuple[str, ...]]:
    """The groups of tensors stored together, by their names."""
    context = FakeContext(graph, is_barrier)
    result = MergeProjections().apply(graph, context)
    graph.lint()
    groups = [tuple(member.name for member in members) for members in context.members.values()]
    assert result.matches == sum(names[0].startswith("weight") for names in groups)
    return groups


def linears(graph: fx.Graph) -> int:
    return sum(node.target is F.linear for node in graph.nodes)


def test_one_matmul_gives_what_three_gave() -> None:
    for bias in (False, True):
        module, x = Projections(bias), torch.randn(5, 8)
        graph = module.graph()
        before = run(graph, x)
        assert len(merge(graph)) == 1 + bias
        assert linears(graph) == 2  # the fourth is behind the barrier
        for old, new in zip(before, run(graph, x), strict=True):
            torch.testing.assert_close(new, old)


def test_nothing_is_merged_across_a_split_op() -> None:
    """Its output would have to cross the cut."""
    graph = Projections().graph()
    assert merge(graph) == [("weight_0", "weight_1", "weight_2")]


def test_a_weight_read_elsewhere_stays() -> None:
    """A tied embedding, say."""
    graph = Projections().graph()
    (weight,) = [node for node in graph.nodes if node.name == "weight_1"]
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*output.args[0], weight),)
    assert merge(graph) == [("weight_0", "weight_2")]


def test_linears_of_other_dtypes_are_not_merged() -> None:
    graph = Projections().graph()
    (weight,) = [node for node in graph.nodes if node.name == "weight_1"]
    weight.meta["example_value"] = weight.meta["example_value"].half()
    assert merge(graph) == [("weight_0", "weight_2")]


def test_a_graph_without_such_linears_is_left_alone() -> None:
    """Weights that are the caller's arguments are not ours to move."""
    graph = Projections().graph()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.name = "argument_" + node.name
    before = str(graph)
    assert merge(graph) == []
    assert str(graph) == before


def misses_of(function: Callable[..., Any], *weights: torch.Tensor) -> list[str]:
    """Why linears of `function(x, weight_0, weight_1, ...)` are not merged, none of which is."""
    names = [f"weight_{i}" for i in range(len(weights))]
    graph = graph_of(as_arguments(function, names), torch.randn(5, 8), *weights)
    result = MergeProjections().apply(graph, FakeContext(graph))
    assert result.matches == 0
    return [f"{miss.node}: {miss.reason}" for miss in result.misses]


def as_arguments(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """With these names of its arguments after `x`, which tracing gives to placeholders."""
    arguments = ", ".join(("x", *names))
    traced: Callable[..., Any] = eval(f"lambda {arguments}: function({arguments})", {"function": function})
    return traced


def test_what_is_changed_between_is_not_read_too_early() -> None:
    def function(x: Any, one: Any, other: Any) -> Any:
        hidden = x * 1.5
        first = F.linear(hidden, one)
        hidden.mul_(2.0)
        return first, F.linear(hidden, other)

    assert misses_of(function, torch.randn(4, 8), torch.randn(4, 8)) == [
        "linear: mul is changed in place by mul_, before all of them read it",
        "linear_1: mul is changed in place by mul_, before all of them read it",
    ]


def test_linears_that_read_the_same_and_stay_apart_say_why() -> None:
    square, vector = torch.randn(8, 8), torch.randn(8)
    assert misses_of(lambda x, a, b: (F.linear(x, a, b), F.linear(x, b)), square, vector) == [
        "linear: its bias weight_1 has more than one reader: linear, linear_1",
        "linear_1: its weight weight_1 has more than one reader: linear, linear_1",
    ]
    assert misses_of(lambda x, a, b, c: (F.linear(x, a, bias=b), F.linear(x, c)), square, vector, square.clone()) == [
        "linear: of linear_1, which read x too, none has its dtype and its bias, or lack of one",
        "linear_1: of linear, which read x too, none has its dtype and its bias, or lack of one",
    ]
    assert misses_of(lambda x, a, b: (F.linear(x, a), F.linear(x, b)), square, vector) == [
        "linear: of linear_1, which read x too, none has its dtype and its bias, or lack of one",
        "linear_1: its weight and bias have the shapes [(8,)]",
    ]


def test_an_op_of_somebody_elses_gets_the_strides_it_saw() -> None:
    """An op that takes any says so with torch's tag."""

    def function(x: Any, one: Any, other: Any) -> Any:
        read = torch.ops.piecegraph_tests.reads_rows.default(F.linear(x, one).view(5, 2, 4))
        return read, torch.ops.piecegraph_tests.reads_strided_rows.default(F.linear(x, other))

    weights = torch.randn(8, 8), torch.randn(4, 8)
    graph = graph_of(as_arguments(function, ["weight_0", "weight_1"]), torch.randn(5, 8), *weights)
    assert MergeProjections().apply(graph, FakeContext(graph)).matches == 1
    assert calls(graph) == ["linear", "getitem", "contiguous", "view", "reads_rows", "getitem", "reads_strided_rows"]


_library = torch.library.Library("piecegraph_tests", "FRAGMENT")
_library.define("reads_rows(Tensor x) -> Tensor")
_library.define("reads_strided_rows(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
for _op in ("reads_rows", "reads_strided_rows"):
    _library.impl(_op, torch.clone, "CompositeExplicitAutograd")


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    """A row for each token, then weights, then biases."""
    rows, size, *columns = shape
    weights = [torch.randn(each, size, generator=random) / size**0.5 for each in columns]
    return torch.randn(rows, size, generator=random), *weights, *(torch.randn(e, generator=random) for e in columns)


def size_of(shape: Sequence[int]) -> int:
    """Return the number of products in a sum, which one matmul may add in another order than several."""
    return shape[1]


def halves(tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


def separate(x: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
    weights, biases = halves(tensors)
    plain = [F.linear(x, weight) for weight in weights]
    return *plain, *(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def merged(x: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
    """Return the results of linears that the pass merged."""
    weights, biases = halves(tensors)
    columns = tuple(len(each) for each in weights)
    whole, whole_bias = torch.cat(weights), torch.cat(biases)
    plain, biased = (merged_linears(x.shape[1], columns, has_bias) for has_bias in (False, True))
    return *plain(x, whole), *biased(x, whole, whole_bias)


@lru_cache
def merged_linears(size: int, columns: tuple[int, ...], has_bias: bool) -> fx.GraphModule:
    """A function of `x`, the stored weight, and the stored bias if there is one."""
    graph = fx.Graph()
    x = placeholder(graph, "x", torch.empty(5, size))
    operands = []
    for i, each in enumerate(columns):
        own = [placeholder(graph, f"weight_{i}", torch.empty(each, size))]
        operands.append([*own, placeholder(graph, f"bias_{i}", torch.empty(each))] if has_bias else own)
    graph.output(tuple(call(graph, F.linear, x, *own) for own in operands))
    assert len(merge(graph)) == 1 + has_bias
    assert linears(graph) == 1
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("shapes", quick_and_all(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_matmul_is_no_less_exact_than_several(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> None:
    assert_no_less_exact(merged, separate, separate, make_inputs, shapes, dtype, num_terms=size_of)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_matmul_of_a_gpu_is_no_less_exact_than_several(dtype: torch.dtype) -> None:
    assert_no_less_exact(merged, separate, separate, make_inputs, SHAPES, dtype, "cuda", num_terms=size_of)


def test_quantised_linears_are_merged_with_their_scales() -> None:
    """One product gives what three gave; linears of floats, and those with a bias, stay apart from them."""
    graph = fx.Graph()
    x = placeholder(graph, "x", torch.randn(5, 16))
    outs = []
    for number, columns in enumerate((6, 4, 2)):
        values = torch.randint(-127, 128, (columns, 16), dtype=torch.int8)
        weight = placeholder(graph, f"weight_{number}", values)
        scale = placeholder(graph, f"weight_scale_{number}", torch.rand(columns).bfloat16().float())
        node = graph.call_function(INT8_LINEAR, (x, weight, scale, None))
        node.meta["example_value"] = torch.zeros(5, columns)
        outs.append(node)
    outs.append(call(graph, F.linear, x, placeholder(graph, "weight_3", torch.randn(6, 16))))
    graph.output(tuple(outs))
    given = x.meta["example_value"]
    before = run(graph, given)
    context = FakeContext(graph)
    result = MergeProjections().apply(graph, context)
    assert result.matches == 1 and [miss.node for miss in result.misses] == ["linear"]
    assert [len(members) for members in context.members.values()] == [3, 3]
    assert sum(node.target is INT8_LINEAR for node in graph.nodes) == 1
    for old, new in zip(before, run(graph, given), strict=True):
        assert torch.equal(new, old)


def test_linears_in_tiles_are_missed_out_loud() -> None:
    """Also where the numbers of their groups and of their columns are equal."""
    graph = fx.Graph()
    x = placeholder(graph, "x", torch.randn(5, 2048))
    outs = []
    for number in range(2):
        weight = placeholder(graph, f"weight_{number}", torch.zeros(64, 1024, dtype=torch.uint8))
        scale = placeholder(graph, f"weight_scale_{number}", torch.ones(64, 64, 2, dtype=torch.bfloat16))
        outs.append(graph.call_function(INT4_TILES_LINEAR, (x, weight, scale, None)))
        outs[-1].meta["example_value"] = torch.zeros(5, 64)
    graph.output(tuple(outs))
    result = MergeProjections().apply(graph, FakeContext(graph))
    reason = "its scales lie group by group for the CPU's kernel, and weights are joined by rows only"
    assert (result.matches, [miss.reason for miss in result.misses]) == (0, [reason] * 2)
