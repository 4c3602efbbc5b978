"""A linear whose sums are split into parts that a norm adds, by the kernel that its shapes call for."""

from __future__ import annotations

import torch

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.passes.kernels.linear.split_linear import split_linear_on_gpu
from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig, split_config
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig, streamed_parts_config
from piecegraph.passes.kernels.linear.streamed_linear import streamed_parts_on_gpu


def parts_config(
    num_rows: int, num_columns: int, size: int, *, itemsize: int, gpu: GpuLimits
) -> SplitConfig | StreamedConfig | None:
    """Return the layout for `[num_rows, size] @ [num_columns, size].T` in parts; None where one part is as fast."""
    streamed = streamed_parts_config(num_rows, num_columns, size, itemsize=itemsize, gpu=gpu)
    return streamed or split_config(num_rows, num_columns, size, itemsize=itemsize, gpu=gpu)


def linear_parts_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size], contiguous
    config: SplitConfig | StreamedConfig,
) -> torch.Tensor:
    """Return float32 `[num_parts, num_rows, num_columns]`, whose sum over parts is `x @ weight.T`."""
    if isinstance(config, StreamedConfig):
        return streamed_parts_on_gpu(x, weight, config)
    return split_linear_on_gpu(x, weight, config)
