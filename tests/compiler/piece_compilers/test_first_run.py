"""A watched piece that fails its own checks runs as its graph, over inputs that are as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from piecegraph.compiler.piece_compilers.first_run import WatchedPiece, written_positions
from piecegraph.compiler.piece_compilers.protocol import Fallback


def test_what_a_piece_had_written_is_as_it_was() -> None:
    """A check in the middle fails, after a kernel has changed an input."""
    told: list[str] = []
    buffer = torch.zeros(3)

    def halfway(x: torch.Tensor) -> tuple[torch.Tensor]:
        x.add_(1)
        raise AssertionError("expected size 3==4")

    piece = WatchedPiece(halfway, Fallback(lambda: lambda x: (x.add_(1),), (0,)), told.append)
    (found,) = piece(buffer)
    assert torch.equal(buffer, torch.ones(3))
    assert torch.equal(found, torch.ones(3))
    assert told == ["its first run failed a check of its own: expected size 3==4"]


def test_an_error_of_the_model_is_not_blamed_on_the_piece() -> None:
    told: list[str] = []

    def refuse(*inputs: Any) -> Sequence[Any]:
        raise AssertionError("an op of the user's")

    piece = WatchedPiece(refuse, Fallback(lambda: refuse, ()), told.append)
    with pytest.raises(AssertionError, match="an op of the user's"):
        piece(torch.zeros(1))
    assert told == []


def test_written_positions() -> None:
    """Through a view, and not what only may share memory with it."""

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            y.view(-1).add_(x)
            return z * 2

    module = fx.symbolic_trace(Writes())
    for node in module.graph.nodes:
        node.meta["example_value"] = torch.empty(3)
    assert written_positions(module.graph) == (1,)
