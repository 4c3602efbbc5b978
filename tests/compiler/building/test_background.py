"""Models that run before they are compiled: each piece takes the place of its graph between two calls.

Also tests `piece_compilers/graphs_first.py`.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler import load_or_compile
from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.piece_compilers.graphs_first import NOTE
from tests.compiler.later_compiler import LaterCompiler


class TwoParts(torch.nn.Module):
    """Two pieces around a split op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x)).relu() + 1)


def started(compiler: LaterCompiler, *, strict: bool = False) -> tuple[TwoParts, CompiledModel, BackgroundCompile]:
    model, background = TwoParts(), BackgroundCompile()
    config = pg.CompileConfig(split_ops=("aten::sin",), cache=False, strict=strict)
    with patch.object(load_or_compile, "inductor_compiler", lambda *arguments, **options: compiler):
        compiled = pg.compile(
            model, config, dynamic_dims={"x": {0: "n"}}, example_inputs=(torch.randn(3, 4),), background=background
        )
    return model, compiled, background


def swap_until(background: BackgroundCompile, num_swapped: int) -> None:
    while background.num_swapped < num_swapped:
        assert background.wait(60)
        background.swap(most=1)


def test_a_model_runs_its_graphs_until_each_piece_is_compiled() -> None:
    """Only `swap` changes the model, and one more piece runs compiled after it."""
    compiler = LaterCompiler()
    model, compiled, background = started(compiler)
    x = torch.randn(5, 4)
    expected = model(x)
    assert torch.equal(compiled(x), expected)
    report = compiled.report()
    assert (report.compiler, [row.note for row in report.unique_pieces]) == ("inductor", [NOTE, NOTE])
    assert (background.num_swapped, background.num_pieces) == (0, 2)

    compiler.release()
    assert background.wait(60)
    assert torch.equal(compiled(x), expected)
    assert compiler.calls == {0: 0}
    swap_until(background, 1)
    assert torch.equal(compiled(x), expected)
    assert compiler.calls == {0: 1}
    assert not background.is_finished

    compiler.release()
    swap_until(background, 2)
    while not background.is_finished:
        assert background.wait(60)
        background.swap()
    assert torch.equal(compiled(x), expected)
    assert compiler.calls == {0: 2, 1: 1}
    report = compiled.report()
    assert [(row.note, row.compile_seconds) for row in report.unique_pieces] == [("", 0.5), ("", 0.5)]
    assert compiler.is_closed
    compiled.close()


def test_a_compile_that_fails_leaves_the_model_running() -> None:
    compiler = LaterCompiler(fails_at=1)
    model, compiled, background = started(compiler)
    x = torch.randn(2, 4)
    compiler.release(2)
    while not background.is_finished:
        assert background.wait(60)
        background.swap()
    assert str(background.failure) == "the compiler is broken"
    assert background.num_swapped == 1
    assert torch.equal(compiled(x), model(x))
    assert compiler.calls == {0: 1}


def test_closing_the_model_ends_a_compile_that_runs() -> None:
    compiler = LaterCompiler()
    _, compiled, background = started(compiler)
    compiled.close()
    assert compiler.is_interrupted and compiler.is_closed
    assert background.is_finished
    assert background.failure is None


def test_an_error_before_the_first_call_closes_the_compiler() -> None:
    """The pieces are never begun, and no process stays."""
    compiler = LaterCompiler()

    def refuse(calls: object) -> None:
        raise KeyError("refused")

    with (
        patch.object(load_or_compile, "inductor_compiler", lambda *arguments, **options: compiler),
        pytest.raises(KeyError, match="refused"),
    ):
        pg.compile(
            TwoParts(),
            pg.CompileConfig(split_ops=("aten::sin",), cache=False),
            example_inputs=(torch.randn(3, 4),),
            before_compile=refuse,
            background=BackgroundCompile(),
        )
    assert compiler.is_closed


def test_what_must_be_alone_on_the_device_runs_inside_swap() -> None:
    """The first run of a static piece is measured, so the model must not run beside it."""
    background = BackgroundCompile()
    compiler = LaterCompiler()
    _, compiled, background = started(compiler)
    import threading

    ran: list[int] = []
    asked = threading.Thread(target=background._between_calls, args=(lambda: ran.append(threading.get_ident()),))
    asked.start()
    assert background.wait(60)
    assert ran == []
    background.swap()
    asked.join(60)
    assert ran == [threading.get_ident()]
    compiled.close()
