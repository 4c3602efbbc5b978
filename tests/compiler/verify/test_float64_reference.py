from __future__ import annotations

import torch
from torch import fx, nn

from piecegraph.compiler.verify.float64_reference import grouped_mm, run_in_float64, to_float64, value_to_float64


class Norm(nn.Module):
    """A norm that casts to float32 by every spelling that models use, and back."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        other = torch.softmax(x.float(), -1, dtype=torch.float32).to(dtype=torch.bfloat16)
        return wide.to(torch.bfloat16), other, ids.to(torch.int32) + 1


def test_every_float_becomes_float64_and_integers_stay() -> None:
    traced = fx.symbolic_trace(Norm())
    x, ids = torch.randn(3, 8).bfloat16(), torch.arange(3)
    normed, soft, integers = run_in_float64(to_float64(traced), (x, ids))
    exact = x.double()
    assert torch.equal(normed, exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert torch.equal(soft, exact.softmax(-1))
    assert integers.dtype == torch.int32


def test_the_original_graph_is_not_changed() -> None:
    traced = fx.symbolic_trace(Norm())
    before = traced.code
    to_float64(traced)
    traced.recompile()
    assert traced.code == before


def test_only_tensors_of_floats_are_converted() -> None:
    ids = torch.arange(2)
    assert value_to_float64(ids) is ids
    assert value_to_float64(3) == 3
    assert value_to_float64(torch.zeros(2, dtype=torch.float16)).dtype == torch.float64


def test_rows_of_each_group_meet_its_weight() -> None:
    """A group may have no rows; rows after the last group are 0."""
    rows, weights = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, 2, dtype=torch.float64)
    out = grouped_mm(rows, weights, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:5] @ weights[2], torch.zeros(1, 2, dtype=torch.float64)])
    assert torch.equal(out, expected)
