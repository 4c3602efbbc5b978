"""The launch of the convolution of a batch of segments of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton

from piecegraph.runner.state_layers.kernels.calls import StepKernel, row_stride
from piecegraph.runner.state_layers.kernels.conv_prompt import conv_prompt_kernel
from piecegraph.runner.state_layers.libraries.segments import CHUNK_SIZE, RaggedRows

BLOCK_CHANNELS = 64
"""The most channels of a program."""

TOKENS = 16
"""The tokens of a program, which is one warp with 32 results a thread. 8,192 channels of 8,192 tokens take 163 us on an
H200; programs of 64 tokens and 4 warps take 263, and those of 16 take 230 if channels are the grid's first axis."""


def written_parts(channels: Sequence[int]) -> bool:
    """Return whether `conv_prompt` can write parts of such numbers of channels as tensors of their own.

    It writes three, each of a positive multiple of 16 channels, the smallest block.
    """
    return len(channels) == 3 and all(count > 0 and count % 16 == 0 for count in channels)


def conv_prompt(
    x: torch.Tensor,  # [num_tokens, channels], of unit stride
    weight: torch.Tensor,  # [channels, kernel_size], its taps next to one another
    bias: torch.Tensor | None,  # [channels], contiguous
    windows: torch.Tensor,  # [num_segments, channels, kernel_size - 1], contiguous
    out: torch.Tensor,  # [num_rows, channels], contiguous, written; with `parts` the memory of a tensor for each
    after: torch.Tensor,  # as `windows`, written; shares no memory with them
    rows: RaggedRows,
    *,
    is_silu: bool,
    parts: Sequence[int] = (),  # channels, of which `written_parts` is true
) -> StepKernel:
    """Return the launch of a convolution of the batch's rows of `x`; see `causal_conv`."""
    channels, kernel_size = weight.shape
    block_c = max(16, min(BLOCK_CHANNELS, triton.next_power_of_2(channels)))
    while any(count % block_c for count in parts):
        block_c //= 2
    first_end, second_end = tuple(accumulate(parts))[:2] if parts else (0, 0)
    return StepKernel(
        conv_prompt_kernel,
        (rows.chunk_indices.shape[0] * (CHUNK_SIZE // TOKENS), triton.cdiv(channels, block_c)),
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
            "num_rows": out.shape[0],
            "channels": channels,
            "x_stride": row_stride(x),
            "weight_stride": weight.stride(0),
            "FIRST_END": first_end,
            "SECOND_END": second_end,
            "KERNEL_SIZE": kernel_size,
            "CHUNK_SIZE": CHUNK_SIZE,
            "TOKENS": TOKENS,
            "BLOCK_C": block_c,
            "IS_SILU": is_silu,
        },
        {"num_warps": 1},
    )
