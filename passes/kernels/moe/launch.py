"""The launch that all products with experts' weights share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piecegraph.passes.kernels.common.overlapped import Grid, OverlappedKernel
from piecegraph.passes.kernels.moe.config import Tile


def launch_product(
    kernel: OverlappedKernel,
    grid: Grid,
    arguments: tuple[Any, ...],
    weights: torch.Tensor,  # [num_experts, rows, columns], strided as they like
    constants: Mapping[str, Any],  # the kernel's own: they stand between the strides and the tile's
    tile: Tile,
    *,
    x_stride: int | None = None,  # between rows of what is multiplied, where they may have gaps
) -> None:
    all_constants = {
        **({} if x_stride is None else {"X_STRIDE": x_stride}),
        "EXPERT_STRIDE": weights.stride(0),
        "ROW_STRIDE": weights.stride(1),
        "COLUMN_STRIDE": weights.stride(2),
        **constants,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
    }
    kernel.launch(grid, arguments, all_constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
