"""Kernels of our ops are called for beforehand: once for each kind of call, at several sizes, beside compiling."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.compiler.kernels_ahead import ROWS, launches_ahead, meanwhile
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.linear import LINEAR


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
    """And the calls work; here they run on the CPU."""
    graph, bound = graph_and_weights()
    launches = launches_ahead(graph, lambda node: False, bound)
    assert len(launches) == 3 * len(ROWS)
    for launch in launches:
        launch()


def test_split_ops_and_other_devices_are_left() -> None:
    """A split op needs a context that is not there yet; on a CPU nothing is compiled."""
    graph, bound = graph_and_weights()
    assert launches_ahead(graph, lambda node: True, bound) == []
    for node in graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = torch.empty(3, 8)
    assert launches_ahead(graph, lambda node: False, bound) == []


def test_where_weights_are_fake_nothing_will_run() -> None:
    graph, bound = graph_and_weights()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(bound["a"])
    assert launches_ahead(graph, lambda node: False, {**bound, "a": fake}) == []


def test_what_runs_meanwhile_is_done_at_the_end() -> None:
    """Beside the body, and a failing one is nobody's error."""
    began, go_on, ended = threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        assert go_on.wait(10)
        ended.append(1)

    def failing() -> None:
        raise RuntimeError("no kernel")

    with meanwhile([slow, failing]):
        assert began.wait(10)
        assert not ended
        go_on.set()
    assert ended == [1]


def test_the_bodys_error_is_its_own() -> None:
    with pytest.raises(ValueError, match="body"), meanwhile([nn.Identity]):
        raise ValueError("body")
