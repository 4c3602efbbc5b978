"""Which static piece runs at which sizes, decided without compiling anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.common.report import NOTHING_TO_GAIN
from piecegraph.compiler.piece_compilers.static_piece import choose_static

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


class Followed(nn.Module):
    """A norm and a linear, which passes make ops of, and what is left for Inductor after them."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.then = then
        self.norm, self.linear = nn.RMSNorm(64, eps=1e-6).bfloat16(), nn.Linear(64, 32).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.linear(self.norm(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "sizes", "notes"),
    [
        (lambda out: out, (), []),
        (lambda out: torch.cat((out, out), -1).cos() * 2, (), [NOTHING_TO_GAIN] * 2),
        (lambda out: out.softmax(-1), (1, 2), ["", ""]),
    ],
    ids=["ops alone", "number by number", "sums"],
)
def test_a_piece_is_static_where_it_sums(
    then: Callable[[torch.Tensor], torch.Tensor], sizes: tuple[int, ...], notes: list[str]
) -> None:
    """Ops see the sizes of each call, and another compile of them would give the same piece; where numbers are computed
    one by one it would be no faster, and the report says so."""
    config = pg.CompileConfig(
        compiler="inductor", compile_workers=0, compile_sizes=(1, 2), passes=("fuse-add-rms-norm", "fuse-linear")
    )
    module = Followed(then).eval().requires_grad_(False)
    with pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(3, 64).bfloat16(),)) as model:
        report = model.report()
        assert [row.matches for row in report.passes] == [1, 1]
        assert report.static_sizes == sizes
        assert [row.note for row in report.static_pieces] == notes
        for rows in (1, 2, 5):
            x = torch.randn(rows, 64).bfloat16()
            torch.testing.assert_close(model(x), module(x))
