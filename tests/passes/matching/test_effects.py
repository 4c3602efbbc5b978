"""The tensors that calls change in place, and whose memory they return; too many if in doubt."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.matching.effects import (
    Memory,
    changed_between,
    erase_dead,
    is_contiguous,
    is_pure,
    is_unmodified_input,
    view_source,
    written_by,
)


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with the value that it computes of its arguments' values."""
    node = (
        graph.call_method(target, args, kwargs)
        if isinstance(target, str)
        else graph.call_function(target, args, kwargs)
    )
    values, named = fx.map_arg((args, kwargs), lambda each: each.meta["example_value"])
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    node.meta["example_value"] = function(*values, **named)
    return node


def start() -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(3, 4)
    return graph, x


def test_every_form_of_write_in_place_is_found() -> None:
    graph, x = start()
    y = call(graph, torch.sin, x)
    assert written_by(y) == ()
    assert written_by(call(graph, "add_", y, 1.0)) == (y,)
    assert written_by(call(graph, operator.setitem, y, slice(None), x)) == (y,)
    assert written_by(call(graph, operator.iadd, y, x)) == (y,)
    assert written_by(call(graph, torch.sin, x, out=y)) == (x, y)
    assert written_by(call(graph, F.relu, y, inplace=True)) == (y,)
    assert written_by(call(graph, torch.ops.aten.mul_.Tensor, y, x)) == (y,)
    assert written_by(call(graph, torch.ops.aten.mul.Tensor, y, x)) == ()
    assert written_by(call(graph, torch.ops.aten.mul, y, x)) == (y, x)  # several ops, some of which write
    assert written_by(call(graph, torch.ops.aten.sigmoid.default, y)) == ()
    assert written_by(call(graph, _unknown, y, x)) == (y, x)


def _unknown(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0] + tensors[1]


def test_views_are_told_from_copies() -> None:
    graph, x = start()
    across = call(graph, "transpose", x, 0, 1)
    assert view_source(across) is x
    assert view_source(call(graph, "reshape", x, 12)) is x
    assert view_source(call(graph, "reshape", across, 12)) is None
    assert view_source(call(graph, "contiguous", x)) is x
    assert view_source(call(graph, "contiguous", across)) is None
    assert view_source(call(graph, "to", x, torch.float32)) is x
    assert view_source(call(graph, "to", x, torch.float64)) is None
    assert view_source(call(graph, "to", x, torch.float32, copy=True)) is None
    assert view_source(call(graph, operator.getitem, x, (Ellipsis, slice(1, 2)))) is x
    assert view_source(call(graph, operator.getitem, x, [0, 1])) is None
    assert view_source(call(graph, F.dropout, x, 0.5, training=False)) is x
    assert view_source(call(graph, F.dropout, x, 0.5)) is None
    turned = call(graph, getattr, x, "T")
    assert view_source(turned) is x and is_pure(turned) and not written_by(turned)
    assert is_contiguous(x) and not is_contiguous(across)


def test_a_write_through_a_view_is_a_write() -> None:
    graph, x = start()
    y, z = call(graph, torch.sin, x), call(graph, torch.cos, x)
    call(graph, "add_", call(graph, "view", call(graph, "transpose", y, 0, 1), 4, 3), 1.0)
    graph.output((z,))
    memory = Memory(graph)
    assert memory.is_written(y)
    assert not memory.is_written(z) and not memory.is_written(x)
    assert memory.is_held_outside(z) and memory.is_held_outside(x)
    assert not memory.is_held_outside(y)


def test_only_writes_asked_about_count() -> None:
    graph, x = start()
    y = call(graph, torch.sin, x)
    write = call(graph, "add_", y, 1.0)
    graph.output((y,))
    assert Memory(graph, writers=[write]).is_written(y)
    assert not Memory(graph, writers=[]).is_written(y)


def test_inputs_may_be_one_memory() -> None:
    """A buffer that one input names may be written through another."""
    graph, x = start()
    other = graph.placeholder("other")
    other.meta["example_value"] = torch.randn(3, 4)
    call(graph, "copy_", x, other)
    graph.output((other,))
    assert Memory(graph).is_written(other)


def test_dead_calls_go_and_effects_stay() -> None:
    graph, x = start()
    call(graph, torch.cos, call(graph, torch.sin, x))
    kept = call(graph, torch.exp, x)
    call(graph, torch._C._log_api_usage_once, "name")
    write = call(graph, "add_", x, 1.0)
    graph.output((x,))
    erase_dead(graph, keep=[kept])
    assert [node for node in graph.nodes if node.op not in ("placeholder", "output")] == [kept, write]
    assert is_pure(kept) and not is_pure(write)


def test_what_changes_between_two_calls() -> None:
    graph, x = start()
    y = call(graph, torch.sin, x)
    first = call(graph, torch.cos, y)
    row = call(graph, operator.getitem, y, 0)
    written = call(graph, "mul_", row, 2.0)
    last = call(graph, torch.tanh, y)
    assert changed_between(first, last, (x, y)) == (y, written)
    assert changed_between(first, last, (x, first)) is None
    assert changed_between(first, written, (y,)) is None
    assert changed_between(written, last, (y,)) is None


def test_an_unmodified_input_is_one_that_no_call_changes() -> None:
    graph, x = start()
    part = call(graph, operator.getitem, x, 0)
    assert is_unmodified_input(x) and is_unmodified_input(part)
    assert not is_unmodified_input(call(graph, torch.sin, x))
    call(graph, "mul_", part, 2.0)
    assert not is_unmodified_input(part)
    call(graph, "mul_", x, 2.0)
    assert not is_unmodified_input(x)


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_unmodified_input_is_changed_under_none_of_its_names(is_cut: bool) -> None:
    """Neither through another view of it, nor through one of the parts that it is cut into."""
    graph, x = start()
    seen, other = call(graph, "view", x, -1), call(graph, torch.transpose, x, 0, 1)
    if is_cut:
        seen, other = (call(graph, operator.getitem, call(graph, torch.chunk, x, 2), i) for i in range(2))
    assert is_unmodified_input(x) and is_unmodified_input(seen)
    call(graph, "mul_", call(graph, operator.getitem, other, 0), 2.0)
    assert not is_unmodified_input(x) and not is_unmodified_input(seen) and not is_unmodified_input(other)
