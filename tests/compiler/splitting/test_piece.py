"""The canonical text: equal for layers of a decoder, different wherever an artifact could differ."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.splitting.piece import canonical_text
from piecegraph.compiler.splitting.piece_format import (
    NotExpressible,
    dump_piece,
    find_process_local_function,
    load_piece,
)
from piecegraph.compiler.tracing.trace import trace


def graph_of(module: nn.Module, *args: Any, dims: Any = None) -> torch.fx.GraphModule:
    return trace(module, args, {}, dims or {}).graph_module


class Affine(nn.Module):
    def __init__(self, scale: float = 1.5, dtype: torch.dtype = torch.float32, inplace: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        self.scale, self.inplace = scale, inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x * self.weight * self.scale, inplace=self.inplace)


def test_names_and_weights_are_not_in_the_text() -> None:
    x = torch.ones(3, 4)
    assert canonical_text(graph_of(Affine(), x)) == canonical_text(graph_of(nn.Sequential(Affine()), x))


@pytest.mark.parametrize(
    ("module", "x", "dims"),
    [
        (Affine(scale=1.5000001), torch.ones(3, 4), None),
        (Affine(inplace=True), torch.ones(3, 4), None),
        (Affine(dtype=torch.float64), torch.ones(3, 4), None),
        (Affine(), torch.ones(3, 4, dtype=torch.bfloat16), None),
        (Affine(), torch.ones(5, 4), None),
        (Affine(), torch.ones(4, 3).T, None),
        (Affine(), torch.ones(3, 4), {"x": 0}),
    ],
    ids=["constant", "in place", "weight dtype", "input dtype", "size", "strides", "dynamic"],
)
def test_the_text_differs_in_everything_an_artifact_depends_on(module: nn.Module, x: torch.Tensor, dims: Any) -> None:
    assert canonical_text(graph_of(module, x, dims=dims)) != canonical_text(graph_of(Affine(), torch.ones(3, 4)))


def scaled_by(factor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that a graph calls as it is."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(factor, "by", factor)

    allowed: Callable[[torch.Tensor], torch.Tensor] = torch._dynamo.allow_in_graph(scale)
    return allowed


class Calling(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) + 1


def test_functions_of_one_name_that_close_over_different_values_differ() -> None:
    """Those that close over equal numbers are equal; over objects, only a function and itself."""
    x, thing = torch.ones(3), types.SimpleNamespace(by=2.0)
    two, again, three = (canonical_text(graph_of(Calling(scaled_by(by)), x)) for by in (2.0, 2.0, 3.0))
    assert two == again != three
    calling = Calling(scaled_by(thing))
    one, same, other = (canonical_text(graph_of(m, x)) for m in (calling, calling, Calling(scaled_by(thing))))
    assert one == same != other


def test_size_names_do_not_matter_but_sharing_does() -> None:
    """Two dims of one size make another piece than two dims that vary freely."""

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum() + y.sum()

    x = torch.ones(3)
    one = canonical_text(graph_of(Outer(), x, x.clone(), dims={"x": {0: "a"}, "y": {0: "a"}}))
    renamed = canonical_text(graph_of(Outer(), x, x.clone(), dims={"x": {0: "b"}, "y": {0: "b"}}))
    two = canonical_text(graph_of(Outer(), x, x.clone(), dims={"x": {0: "a"}, "y": {0: "b"}}))
    assert one == renamed
    assert one != two


def test_devices_count_by_type_not_index() -> None:
    """A rank is no property of a piece."""
    text = canonical_text(graph_of(Affine(), torch.ones(3, 4)))
    assert "cpu" in text
    assert "cpu:" not in text


def test_a_piece_survives_as_data() -> None:
    """Written and read, a piece has the same canonical text and computes the same."""
    graph_module = graph_of(Affine(), torch.ones(3, 4), dims={"x": 0})
    again, examples = load_piece(dump_piece(graph_module))
    assert canonical_text(again) == canonical_text(graph_module)
    assert len(examples) == sum(node.op == "placeholder" for node in again.graph.nodes)
    names = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    values = [torch.randn(2, 4) if "x" in name else torch.randn(4) for name in names if not name.startswith("u")]
    sizes = [2 for name in names if name.startswith("u")]
    arguments = [sizes.pop() if name.startswith("u") else values.pop(0) for name in names]
    assert torch.equal(again(*arguments)[0], graph_module(*arguments)[0])


def test_ops_of_this_process_are_found() -> None:
    class Private(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.pgtoy.triple.default(x) + 1
            return result

    assert find_process_local_function(graph_of(Private(), torch.ones(3))) == "torch.ops.pgtoy.triple.default"
    assert find_process_local_function(graph_of(Affine(), torch.ones(3, 4))) is None
    config = pg.CompileConfig(split_ops=("pgtoy::attention",), compile_workers=2)
    with pytest.raises(pg.errors.SplitOpUnused):
        pg.compile(Private(), config, example_inputs=(torch.ones(3),))
    compiled = pg.compile(Private(), pg.CompileConfig(compile_workers=2), example_inputs=(torch.ones(3),))
    assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
    (row,) = compiled.report().unique_pieces
    assert row.note == "compiled in this process: only it knows torch.ops.pgtoy.triple.default"


def test_subgraphs_cannot_be_written_as_data() -> None:
    class Cond(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))
            return result

    graph_module = graph_of(Cond(), torch.ones(3))
    assert "graph {" in canonical_text(graph_module)
    with pytest.raises(NotExpressible, match="subgraph"):
        dump_piece(graph_module)
