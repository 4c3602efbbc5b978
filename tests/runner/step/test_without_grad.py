"""Gradients are disabled inside the function, and restored afterwards."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.step.without_grad import without_grad


@without_grad
def is_on(fails: bool = False) -> bool:
    if fails:
        raise ValueError("inside")
    return torch.is_grad_enabled()


@pytest.mark.parametrize("outside", [True, False])
def test_gradients_are_off_inside_and_restored_afterwards(outside: bool) -> None:
    with torch.set_grad_enabled(outside):
        assert not is_on()
        assert torch.is_grad_enabled() is outside
        with pytest.raises(ValueError, match="inside"):
            is_on(fails=True)
        assert torch.is_grad_enabled() is outside
