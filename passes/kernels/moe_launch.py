"""Launches of the kernels of routed experts: on a GPU, or interpreted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piecegraph.passes.kernels.overlapped import Grid, OverlappedKernel


class MoeKernel:
    """An `OverlappedKernel` that also runs in Triton's interpreter, over tensors of the CPU."""

    def __init__(self, kernel: Any) -> None:
        self._overlapped = OverlappedKernel(kernel)

    def launch(
        self, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any], *, num_warps: int, num_stages: int
    ) -> None:
        """See `OverlappedKernel.launch`."""
        if any(isinstance(each, torch.Tensor) and not each.is_cuda for each in arguments):
            self._overlapped.kernel[grid](*arguments, **constants, OVERLAP=False)
            return
        self._overlapped.launch(grid, arguments, constants, num_warps=num_warps, num_stages=num_stages)
