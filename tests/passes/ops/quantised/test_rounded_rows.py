"""Rows are rounded to the nearest value of their group's scale; a number that is not finite spoils its group."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows
from tests.passes.kernels.quantised.quantised_inputs import spread

E4M3 = torch.float8_e4m3fn


def test_e4m3_is_within_a_sixteenth() -> None:
    """Or within the smallest step of its group; a group of zeros stays zero, and the last group may be smaller."""
    x = torch.randn(5, 40) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2] = 0
    for group, per_group in ((WHOLE_TOKEN, 40), (16, 16)):
        near = spread(*round_rows(x, group, E4M3), per_group)
        padded = F.pad(x, (0, -40 % per_group)).unflatten(1, (-1, per_group)).abs().amax(-1, keepdim=True)
        largest = padded.expand(-1, -1, per_group).flatten(1)[:, :40]
        assert bool(((near - x).abs() <= x.abs() / 16 + largest / 448 / 512 + 1e-12).all())
        assert not near[2].any()


def test_int8_is_within_half_a_step() -> None:
    x = torch.randn(2, 3, 40)
    values, step = round_rows(x, WHOLE_TOKEN, torch.int8)
    assert values.shape == x.shape and step.shape == (2, 3, 1)
    assert bool(((values.double() * step.double() - x.double()).abs() <= 0.51 * step.double()).all())


def test_a_number_that_is_not_finite_spoils_its_group_alone() -> None:
    x = torch.randn(4, 32)
    x[1, 20], x[3, 2] = torch.inf, torch.nan
    for stored in (torch.int8, E4M3):
        assert round_rows(x, WHOLE_TOKEN, stored)[1].isnan().flatten().tolist() == [False, True, False, True]
    assert round_rows(x, 16, E4M3)[1].isnan().tolist() == [[False] * 2, [False, True], [False] * 2, [True, False]]


def test_the_largest_magnitude_may_be_given() -> None:
    """Ranks that have parts of a token round with one scale."""
    x = torch.randn(3, 32)
    largest = x.abs().amax(-1, keepdim=True)
    for stored in (torch.int8, E4M3):
        whole, step = round_rows(x, WHOLE_TOKEN, stored)
        parts = [round_rows(part, WHOLE_TOKEN, stored, largest) for part in x.chunk(2, -1)]
        assert all(torch.equal(each, step) for _, each in parts)
        assert torch.equal(torch.cat([values.float() for values, _ in parts], -1), whole.float())
