"""What a compiled piece returns is what was read when it was read, whatever the piece writes into its inputs later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import piecegraph as pg
from piecegraph.compiler.inductor.custom_pass import POST_GRAD_OPTION
from piecegraph.compiler.inductor.written_inputs import copy_outputs, copy_overlaps, with_outputs_apart

WIDTH = 8


class Writes(nn.Module):
    """Five programs, each over an argument of its own: Inductor alone gives wrong numbers for the first four, and in
    the last a result that lies in the argument's memory."""

    def forward(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        a[0] = a.mean()
        between_setitems = a.clone()
        a[:1] += 1.0

        b[0] = b.mean()
        before_mul = b.clone()
        b.mul_(2)

        c.index_put_((torch.tensor([0]),), c.mean())
        after_index_put = c.clone()
        c.mul_(2)

        d[0] = d.mean()
        view = d.clone().view(-1)[3:]
        d[1] = 2.0

        e[0] = e.mean()
        last = e.clone()
        return between_setitems, before_mul, after_index_put, view, last


class Overlaps(nn.Module):
    """Programs that write into a tensor what they took from it. Inductor alone gives wrong numbers for some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 2)

    def forward(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        a[1:] = a[:-1].clone()
        product = b @ self.weight
        product[1:] = product[:-1].clone()
        swapped = c.clone()
        c.copy_(d)
        d.copy_(swapped)
        e.index_put_((torch.arange(1, e.shape[0]),), e[:-1].clone())
        b.copy_(b.flip(0))
        return a.sum(), product


def arguments(num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return [torch.randn(num_rows, WIDTH, generator=generator) for _ in range(5)]


@pytest.mark.parametrize("module", [Writes(), Overlaps()], ids=["outputs", "overlaps"])
def test_values_are_those_from_between_the_writes(module: nn.Module) -> None:
    config = pg.CompileConfig(passes=(), compile_workers=0, cache=False)
    model = pg.compile(
        module,
        config,
        dynamic_dims={name: {0: "num_rows"} for name in "abcde"},
        example_inputs=tuple(arguments(6)),
    )
    assert not model.report().eager_pieces
    for num_rows in (6, 4, 33):
        expected_arguments, got_arguments = arguments(num_rows), arguments(num_rows)
        expected, got = module(*expected_arguments), model(*got_arguments)
        torch.testing.assert_close(got, expected)
        for result in got:
            result.fill_(7.0)
        torch.testing.assert_close(got_arguments, expected_arguments)


def functional_graph(is_written: bool) -> tuple[fx.Graph, fx.Node]:
    """A graph as Inductor has it: `out` is returned through a view, and copied into the input if that is written."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    out = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    out.meta["val"] = torch.empty(2, 3)
    view = graph.call_function(torch.ops.aten.view.default, (out, [6]))
    view.meta["val"] = torch.empty(6)
    results = [view]
    if is_written:
        results.append(graph.call_function(torch.ops.aten.copy_.default, (x, out)))
    graph.output(tuple(results))
    return graph, view


def test_a_graph_that_writes_no_input_is_left_alone() -> None:
    graph, _ = functional_graph(is_written=False)
    before = str(graph)
    copy_outputs(graph)
    assert str(graph) == before


def test_a_view_that_is_returned_is_of_the_copy() -> None:
    graph, view = functional_graph(is_written=True)
    copy_outputs(graph)
    graph.lint()
    assert view.all_input_nodes[0].target is torch.ops.aten.clone.default


def test_what_a_write_takes_from_its_own_memory_is_copied() -> None:
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    x.meta["val"] = other.meta["val"] = torch.empty(3, 3)
    rows = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 2))
    rows.meta["val"] = torch.empty(2, 3)
    shifted = graph.call_function(torch.ops.aten.slice_scatter.default, (x, rows, 0, 1, 3))
    apart = graph.call_function(torch.ops.aten.slice_scatter.default, (other, rows, 0, 1, 3))
    graph.output((shifted, apart))
    copy_overlaps(graph)
    graph.lint()
    copied = shifted.args[1]
    assert isinstance(copied, fx.Node) and copied.target is torch.ops.aten.clone.default and copied.args == (rows,)
    assert shifted.args == (x, copied, 0, 1, 3) and apart.args[1] is rows


def test_a_pass_that_the_options_name_runs_first() -> None:
    seen = []

    def named(graph: fx.Graph) -> None:
        seen.append(str(graph))

    options = with_outputs_apart({POST_GRAD_OPTION: named, "max_autotune": True})
    graph, _ = functional_graph(is_written=True)
    before = str(graph)
    options[POST_GRAD_OPTION](graph)
    assert seen == [before] and str(graph) != before
    assert options[POST_GRAD_OPTION].uuid() is None and options["max_autotune"] is True
