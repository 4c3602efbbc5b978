"""Cutting a graph: one call per split op, tensors and declared sizes across cuts, no empty pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.splitting.plan import CallStep, PieceStep
from piecegraph.errors import CompileError
from tests.compiler.toy import HIDDEN


def compiled(module: nn.Module, split_ops: tuple[str, ...], rows: int = 5, compiler: str = "eager") -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=split_ops, compiler=compiler, compile_workers=0)
    return pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(rows, HIDDEN),))


def check(module: nn.Module, model: pg.CompiledModel, exact: bool = True) -> None:
    for rows in (1, 2, 7, 30):
        x = torch.randn(rows, HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(model(x), module(x), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


class SizesCross(nn.Module):
    """`2 * num_tokens` is made before the first cut and read after the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * 2
        halves = x.view(rows, -1)
        for _ in range(3):
            halves = torch.ops.pgtoy.triple(halves).relu().reshape(rows, HIDDEN // 2)
        return halves.reshape(x.shape[0], HIDDEN)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_derived_sizes_are_computed_where_they_are_read(compiler: str) -> None:
    """Equal layers stay equal: a derived size is no input of a piece."""
    module = SizesCross()
    model = compiled(module, ("pgtoy::triple",), compiler=compiler)
    check(module, model, exact=compiler == "eager")
    report = model.report()
    assert (report.num_pieces, report.num_split_ops) == (4, 3)
    assert report.num_unique_pieces == 3
    arguments = {slot.name for step in model.plan.piece_steps for slot in step.inputs}
    assert "mul" not in arguments


def test_tuple_results_of_a_split_op_are_taken_apart_between_pieces() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.ops.pgtoy.pair(x.relu())
            result: torch.Tensor = first * second
            return result

    module = Pair()
    model = compiled(module, ("pgtoy::pair",))
    check(module, model)
    assert [type(step) for step in model.plan.steps] == [PieceStep, CallStep, CallStep, CallStep, PieceStep]


def test_tuples_made_in_a_piece_cross_as_tensors() -> None:
    class Chunks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            result: torch.Tensor = torch.ops.pgtoy.triple(left) + right
            return result

    module = Chunks()
    check(module, compiled(module, ("pgtoy::triple",)))


def test_adjacent_split_ops_leave_no_empty_piece() -> None:
    class Adjacent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.pgtoy.triple(torch.ops.pgtoy.triple(x))
            return result

    module = Adjacent()
    model = compiled(module, ("pgtoy::triple",))
    check(module, model)
    assert (model.report().num_pieces, model.report().num_split_ops) == (0, 2)


def test_a_split_op_without_outputs_is_never_dropped() -> None:
    """FX would drop an op nobody reads, in-place or not; the count of split ops is checked."""

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.pgtoy.attention(x, x, x, out, "a")  # a packet, not an overload
            return out

    module = InPlace()
    model = compiled(module, ("pgtoy::attention",))
    check(module, model)
    assert model.report().num_split_ops == 1


def test_builtin_attention_is_cut_by_default() -> None:
    class Builtin(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(1, -1, 2, HIDDEN // 2).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return out.transpose(1, 2).reshape(x.shape) + 1

    module = Builtin()
    config = pg.CompileConfig(compiler="eager")
    model = pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(5, HIDDEN),))
    check(module, model)
    assert [call.op for call in model.split_calls] == ["aten::scaled_dot_product_attention"]


def test_a_cut_inside_a_with_block_is_an_error() -> None:
    class Autocast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = torch.ops.pgtoy.triple(x + 1)
                return x @ x.T

    with pytest.raises(CompileError, match="a split op lies inside a `with` block of forward"):
        compiled(Autocast(), ("pgtoy::triple",))
