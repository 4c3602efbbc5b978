"""Arguments that share memory are refused if one of them is written, and only then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.splitting.overlaps import may_overlap
from piecegraph.errors import InputMismatch, UnsupportedModel

CONFIG = pg.CompileConfig(compiler="eager", passes=(), cache=False)


class Writes(nn.Module):
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += 1.0
        self.state.mul_(0.5)
        return x * 2 + y


class Reads(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


def compiled(module: nn.Module) -> pg.CompiledModel:
    return pg.compile(module, CONFIG, example_inputs=(torch.ones(4, 8), torch.ones(4, 8)))


def test_one_tensor_twice_is_refused_where_it_is_written() -> None:
    model, x = compiled(Writes()), torch.ones(4, 8)
    with pytest.raises(InputMismatch, match=r"x and y lie in the same memory, and the model changes x in place"):
        model(x, x)
    assert torch.equal(x, torch.ones(4, 8))
    memory = torch.ones(6, 8)
    with pytest.raises(InputMismatch, match="the same memory"):
        model(memory[:4], memory[2:])
    with pytest.raises(InputMismatch, match="the same memory"):
        model(memory[2:], memory[:4])


def test_arrays_that_overlap_are_refused_though_their_storages_differ() -> None:
    """Each tensor made of a slice of a numpy array has a storage of its own, which begins where the slice does."""
    model, numbers = compiled(Writes()), np.ones((8, 8), np.float32)
    x, y, apart = (torch.from_numpy(numbers[at : at + 4]) for at in (0, 2, 4))
    with pytest.raises(InputMismatch, match="the same memory"):
        model(x, y)
    with pytest.raises(InputMismatch, match="the same memory"):
        model(y, x)
    assert torch.equal(model(x, apart), torch.full((4, 8), 5.0))


def test_neighbours_in_one_memory_are_accepted() -> None:
    model, memory = compiled(Writes()), torch.ones(8, 8)
    assert torch.equal(model(memory[:4], memory[4:]), torch.full((4, 8), 5.0))


def test_a_written_buffer_is_refused_as_an_argument() -> None:
    module = Writes()
    with pytest.raises(InputMismatch, match="changes state in place"):
        compiled(module)(torch.ones(4, 8), module.state)


def test_where_nothing_is_written_nothing_is_compared() -> None:
    model, x = compiled(Reads()), torch.ones(4, 8)
    assert model.plan.written == ()
    assert torch.equal(model(x, x), torch.full((4, 8), 3.0))


def test_overlaps_are_refused_under_torch_compile_too() -> None:
    """torch's own guards notice only one tensor passed twice."""
    module = torch.compile(Writes(), backend="piecegraph", options={"compiler": "eager", "cache": False})
    memory = torch.ones(6, 8)
    module(torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(InputMismatch, match="the same memory"):
        module(memory[:4], memory[2:])


def test_columns_of_the_same_rows_are_apart() -> None:
    rows = torch.ones(4, 8)
    assert not may_overlap(rows[:, :4], rows[:, 4:])
    assert not may_overlap(rows[:2, 4:], rows[2:, :4])
    assert may_overlap(rows[:, :5], rows[:, 3:])
    assert may_overlap(rows, rows[1])
    assert not may_overlap(rows[:0], rows[:0])


class Buffers(nn.Module):
    """Two buffers, one of which is written; a value of the other is read before and after."""

    x: torch.Tensor
    y: torch.Tensor

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("x", x)
        self.register_buffer("y", y)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        before = self.y * 2
        self.x[3:] += t.sum()
        return before + self.y * 3


def test_buffers_of_overlapping_arrays_are_refused_where_one_is_written() -> None:
    """Inductor computes from what it has read before the write: no storage tells it that the two overlap."""
    numbers = np.arange(16, dtype=np.float32)
    x, y, apart = (torch.from_numpy(numbers[at : at + 8]) for at in (0, 2, 8))
    with pytest.raises(UnsupportedModel, match="x and .*y lie in the same memory but are no views of one tensor"):
        pg.compile(Buffers(x, y), CONFIG, example_inputs=(torch.ones(3),))
    model = pg.compile(Buffers(x, apart), CONFIG, example_inputs=(torch.ones(3),))
    assert torch.equal(model(torch.ones(3)), 5 * apart)
    of_one = torch.arange(10.0)
    views = pg.compile(Buffers(of_one[:8], of_one[2:]), CONFIG, example_inputs=(torch.ones(3),))
    again = torch.arange(10.0)
    assert torch.equal(views(torch.ones(3)), Buffers(again[:8], again[2:])(torch.ones(3)))


def test_buffers_without_memory_overlap_with_nothing() -> None:
    """Tensors on the meta device all begin at address 0."""
    nothing = torch.ones(8, device="meta")
    pg.compile(Buffers(nothing, nothing.clone()), CONFIG, example_inputs=(torch.ones(3, device="meta"),))
