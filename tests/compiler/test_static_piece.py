"""Which static piece runs at which sizes, decided without compiling anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.static_piece import choose_static

TOKENS, LOGITS = "u0", "u1"
SYMBOLS = (frozenset({TOKENS}), frozenset({TOKENS, LOGITS}), frozenset[str](), frozenset({"u9"}))
AVAILABLE = {(unique, size): None for unique in (0, 1) for size in (1, 4)}


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ({TOKENS: 1, LOGITS: 1}, (1, 1, None, None)),
        ({TOKENS: 4, LOGITS: 4}, (4, 4, None, None)),
        ({TOKENS: 4, LOGITS: 1}, (4, None, None, None)),  # both are sizes, but not the same
        ({TOKENS: 3, LOGITS: 4}, (None, None, None, None)),
        ({TOKENS: 2, LOGITS: 2}, (None, None, None, None)),
        ({}, (None, None, None, None)),
    ],
)
def test_a_static_piece_runs_only_where_every_size_is_its_own(
    sizes: dict[str, int], chosen: tuple[int | None, ...]
) -> None:
    assert choose_static(SYMBOLS, AVAILABLE, sizes) == chosen


def test_one_that_failed_is_not_chosen() -> None:
    available = {key: None for key in AVAILABLE if key != (0, 4)}
    assert choose_static(SYMBOLS, available, {TOKENS: 4, LOGITS: 4}) == (None, 4, None, None)


class Scaled(nn.Module):
    """A norm and a linear, which passes make ops of; with `scale` something is left for Inductor."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.scale = scale
        self.norm, self.linear = nn.RMSNorm(64, eps=1e-6).bfloat16(), nn.Linear(64, 32).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x))
        return out * 2 if self.scale else out


@pytest.mark.parametrize(("scale", "sizes"), [(False, ()), (True, (1, 2))])
def test_a_piece_of_nothing_but_our_ops_is_static_nowhere(scale: bool, sizes: tuple[int, ...]) -> None:
    """They see the sizes of each call; another compile would give the same piece."""
    config = pg.CompileConfig(
        compiler="inductor", compile_workers=0, compile_sizes=(1, 2), passes=("fuse-add-rms-norm", "fuse-linear")
    )
    module = Scaled(scale).eval().requires_grad_(False)
    with pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(3, 64).bfloat16(),)) as model:
        assert [row.matches for row in model.report().passes] == [1, 1]
        assert tuple(row.size for row in model.report().static_pieces) == sizes
        for rows in (1, 2, 5):
            x = torch.randn(rows, 64).bfloat16()
            torch.testing.assert_close(model(x), module(x))
