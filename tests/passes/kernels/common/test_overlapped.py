"""Launches of kernels that overlap, as far as they can be tested without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.common.overlapped import OverlappedKernel


class Recorder:
    """A stand-in for a kernel that records its calls."""

    arg_names = ("x", "SIZE", "BLOCK", "OVERLAP")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def test_over_tensors_of_a_cpu_the_kernel_is_called_as_it_is() -> None:
    kernel, x = Recorder(), torch.zeros(3)
    OverlappedKernel(kernel).launch((2, 1, 1), (x,), {"SIZE": 3, "BLOCK": 4}, num_warps=1)
    assert kernel.calls == [((2, 1, 1), (x,), {"SIZE": 3, "BLOCK": 4, "OVERLAP": False})]


def test_constants_in_another_order_are_refused() -> None:
    """A GPU is given them by place."""
    with pytest.raises(AssertionError, match=r"constants are \['BLOCK', 'SIZE'\], and the kernel takes \['SIZE', "):
        OverlappedKernel(Recorder()).launch((1, 1, 1), (torch.zeros(3),), {"BLOCK": 4, "SIZE": 3}, num_warps=1)
