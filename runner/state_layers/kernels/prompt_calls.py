"""The launch of the convolution of a batch of segments of prompts."""

from __future__ import annotations

import torch
import triton

from piecegraph.runner.state_layers.kernels.calls import StepKernel, row_stride
from piecegraph.runner.state_layers.kernels.conv_prompt import conv_prompt_kernel
from piecegraph.runner.state_layers.libraries.segments import CHUNK_SIZE, RaggedRows

BLOCK_CHANNELS = 64
"""The channels of a program, which holds as many results as its chunk has tokens for each: 32 a thread of 4 warps."""


def conv_prompt(
    x: torch.Tensor,  # [num_tokens, channels], of unit stride
    weight: torch.Tensor,  # [channels, kernel_size]
    bias: torch.Tensor | None,
    windows: torch.Tensor,  # [num_segments, channels, kernel_size - 1], contiguous
    out: torch.Tensor,  # [num_rows, channels], contiguous, written
    after: torch.Tensor,  # as `windows`, written; no part of them
    rows: RaggedRows,
    *,
    is_silu: bool,
) -> StepKernel:
    """Return the launch of a convolution of the batch's rows of `x`; see `causal_conv`."""
    channels, kernel_size = weight.shape
    block_c = max(16, min(BLOCK_CHANNELS, triton.next_power_of_2(channels)))
    return StepKernel(
        conv_prompt_kernel,
        (rows.chunk_indices.shape[0], triton.cdiv(channels, block_c)),
        {
            "x": x,
            "weight": weight,
            "bias": bias,
            "windows": windows,
            "out": out,
            "after": after,
            "rows": rows.rows,
            "cu_seqlens": rows.cu_seqlens,
            "chunks": rows.chunk_indices,
            "channels": channels,
            "x_stride": row_stride(x),
            "weight_stride": weight.stride(0),
            "KERNEL_SIZE": kernel_size,
            "CHUNK_SIZE": CHUNK_SIZE,
            "BLOCK_C": block_c,
            "IS_SILU": is_silu,
        },
        {"num_warps": 4},
    )
