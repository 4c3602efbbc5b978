"""Kernels of our ops are called for beforehand: once for each kind of call, at several sizes, beside compiling."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.compiler.own_kernels.precompile import (
    MANY_ROWS,
    MAX_BYTES_OF_MANY_ROWS,
    ROWS,
    launch_all,
    precompile_launches,
)
from piecegraph.passes.kernels.linear.linear_config import LinearConfig, linear_config
from piecegraph.passes.kernels.linear.linear_parts import parts_config
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.collectives import ALL_REDUCE_ADD_NORM_LINEAR, ALL_REDUCE_ADD_RMS_NORM
from piecegraph.passes.ops.linear import LINEAR
from piecegraph.passes.ops.rotary_tables import ROTARY_TABLES
from tests.gpus import H200


class _Cuda(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def graph_and_weights() -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """Two linears over weights of one shape, a third of another, and an activation; and what weights are bound to.
    All of it says that it is on a GPU."""
    graph = fx.Graph()

    def called(node: fx.Node, *shape: int) -> fx.Node:
        node.meta["example_value"] = torch.empty(shape).as_subclass(_Cuda)
        return node

    x = called(graph.placeholder("x"), 3, 8)
    for name, rows in (("a", 8), ("b", 8), ("c", 4)):
        weight = called(graph.placeholder(name), rows, 8)
        x = called(graph.call_function(LINEAR, (x, weight, None, "")), 3, rows)
    graph.output((called(graph.call_function(ACT_MUL, (x, "silu")), 3, 2),))
    return graph, {name: torch.ones(rows, 8) for name, rows in (("a", 8), ("b", 8), ("c", 4))}


def test_each_kind_of_call_at_each_size() -> None:
    """The calls work; this test runs them on the CPU."""
    graph, bound = graph_and_weights()
    launches = precompile_launches(graph, lambda node: False)
    assert len(launches) == 3 * len(ROWS)
    for launch in launches:
        launch(bound)


def test_an_op_of_two_results() -> None:
    """Positions are bound to nothing: they are zeros."""
    graph = fx.Graph()
    positions, inv_freq = graph.placeholder("positions"), graph.placeholder("inv_freq")
    positions.meta["example_value"] = torch.empty(3, dtype=torch.int64).as_subclass(_Cuda)
    inv_freq.meta["example_value"] = torch.empty(8).as_subclass(_Cuda)
    tables = graph.call_function(ROTARY_TABLES, (positions, inv_freq, 1.0))
    tables.meta["example_value"] = (torch.empty(3, 16).as_subclass(_Cuda),) * 2
    graph.output((tables,))
    launches = precompile_launches(graph, lambda node: False)
    assert len(launches) == len(ROWS)
    for launch in launches:
        launch({"inv_freq": torch.ones(8)})


def kernels_taken(rows: int) -> set[object]:
    """By a layer of Qwen3-0.6B on an H200, each with what it is compiled for."""
    taken: set[object] = set()
    for columns, size, is_gated in ((4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False)):
        config = linear_config(rows, columns, size, is_gated=is_gated, itemsize=2, gpu=H200)
        has_norm = size == 1024
        parts = None if has_norm else parts_config(rows, columns, size, itemsize=2, gpu=H200)
        if isinstance(parts, StreamedConfig):
            taken |= {replace(parts, num_parts=0), ("norm of parts", parts.num_parts)}
        elif parts is not None:
            taken |= {("split", parts.block_n), ("norm of parts", parts.num_parts)}
        else:
            taken.add(
                (
                    has_norm and rows == 1,
                    rows if isinstance(config, LinearConfig) and config.block_m == 0 else 0,
                    is_gated,
                    config,
                )
            )
    return taken


def test_a_norm_behind_a_sum_over_ranks_is_launched_without_the_sum() -> None:
    """One rank alone would wait for the others."""
    graph = fx.Graph()
    x, residual, weight = (graph.placeholder(name) for name in ("x", "residual", "weight"))
    for node, *shape in ((x, 3, 8), (residual, 3, 8), (weight, 8)):
        node.meta["example_value"] = torch.empty(shape).as_subclass(_Cuda)
    norm = graph.call_function(ALL_REDUCE_ADD_RMS_NORM, (x, residual, weight, 1e-6, 0.0))
    norm.meta["example_value"] = (torch.empty(3, 8).as_subclass(_Cuda),) * 2
    graph.output((norm,))
    launches = precompile_launches(graph, lambda node: False)
    assert len(launches) == len(ROWS)
    for launch in launches:
        launch({"weight": torch.ones(8)})  # a sum would fail: no ranks are there


def test_a_linear_behind_such_a_norm_is_launched_with_the_norm_in_it_and_apart() -> None:
    """A group whose sums have the norm in their kernel takes the linear's own."""
    graph = fx.Graph()
    names = {"x": (3, 64), "residual": (3, 64), "scale": (64,), "weight": (32, 64)}
    nodes = {name: graph.placeholder(name) for name in names}
    for name, shape in names.items():
        nodes[name].meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16).as_subclass(_Cuda)
    x, residual, scale, weight = nodes.values()
    both = graph.call_function(ALL_REDUCE_ADD_NORM_LINEAR, (x, residual, scale, 1e-6, 0.0, weight, None, ""))
    both.meta["example_value"] = (torch.empty(3, 32).as_subclass(_Cuda), torch.empty(3, 64).as_subclass(_Cuda))
    graph.output((both,))
    launches = precompile_launches(graph, lambda node: False)
    assert len(launches) == 2 * len(ROWS)
    for launch in launches:
        launch({"scale": torch.ones(64).bfloat16(), "weight": torch.ones(32, 64).bfloat16()})


def test_the_rows_cover_every_kernel() -> None:
    """No number of rows of a step leaves a kernel to be compiled in a capture."""
    ahead = set().union(*map(kernels_taken, ROWS))
    for rows in range(1, 4097):
        assert kernels_taken(rows) <= ahead, rows


def test_the_rows_reach_the_library_where_a_gated_linear_has_few_columns() -> None:
    """Its activation is then a kernel of ours, which the largest step has: Bamba with 48 columns had it compiled in the
    profile. A linear with more columns than `MANY_ROWS` is launched for has the library before."""

    def has_library(rows: int, columns: int) -> bool:
        return linear_config(rows, columns, 64, is_gated=True, itemsize=2, gpu=H200) is None

    assert not has_library(2048, 48)  # the largest of the other numbers
    for columns in range(16, 2049, 16):
        is_launched = MANY_ROWS * columns * 2 <= MAX_BYTES_OF_MANY_ROWS
        assert has_library(MANY_ROWS if is_launched else 2048, columns), columns


def test_many_rows_are_for_results_of_few_columns() -> None:
    for columns, is_launched in ((128, True), (144, False)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty(3, 2 * columns, dtype=torch.bfloat16).as_subclass(_Cuda)
        num_tokens = ShapeEnv().create_unbacked_symint()
        gated = graph.call_function(ACT_MUL, (x, "silu"))
        with FakeTensorMode(shape_env=num_tokens.node.shape_env):
            value = torch.empty(num_tokens, columns, dtype=torch.bfloat16)
        gated.meta["example_value"] = value
        graph.output((gated,))
        assert len(precompile_launches(graph, lambda node: False)) == len(ROWS) - (not is_launched)


def test_split_ops_and_other_devices_are_not_launched() -> None:
    """A split op needs a context that is not there yet; on a CPU nothing is compiled."""
    graph, _ = graph_and_weights()
    assert precompile_launches(graph, lambda node: True) == []
    for node in graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = torch.empty(3, 8)
    assert precompile_launches(graph, lambda node: False) == []


def test_zeros_replace_fake_weights() -> None:
    """A model that is compiled only for the cache has no weights."""
    _, bound = graph_and_weights()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(bound["a"])
    ran: list[object] = []
    launch_all([ran.append], {**bound, "a": fake})
    assert ran == [{name: tensor for name, tensor in bound.items() if name != "a"}]


def test_all_launches_are_done_at_the_end() -> None:
    """They run concurrently, and a failing launch raises nothing."""
    began, ended = threading.Event(), []

    def slow(bound: object) -> None:
        assert began.wait(10)
        ended.append(1)

    def failing(bound: object) -> None:
        began.set()
        raise RuntimeError("no kernel")

    launch_all([slow, failing], {})
    assert ended == [1]
