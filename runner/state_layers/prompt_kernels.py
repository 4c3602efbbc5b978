"""Prompts on a GPU: the convolutions of a batch of segments run as one Triton kernel, without transposed copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from piecegraph.runner.state_layers.libraries.segments import RaggedRows

ConvolveRows = Callable[[torch.Tensor, torch.Tensor, RaggedRows], tuple[torch.Tensor, torch.Tensor]]
"""A function from `[num_tokens, channels]` and the windows before a batch's segments to the convolution of its rows,
`[num_rows, channels]`, and the windows after them."""


def runs_kernels(x: torch.Tensor) -> bool:
    """Return whether the convolutions of prompts run as a kernel."""
    return x.is_cuda


def convolution_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> ConvolveRows | None:
    """Return what convolves the segments of prompts of `x`, a layer's input; None: torch, one after the other."""
    return partial(_convolve, weight=weight, bias=bias, activation=activation) if runs_kernels(x) else None


def _convolve(
    x: torch.Tensor,
    windows: torch.Tensor,
    rows: RaggedRows,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from piecegraph.runner.state_layers.kernels.prompt_calls import conv_prompt

    x, windows = x if x.stride(1) == 1 else x.contiguous(), windows.contiguous()
    out = x.new_empty((rows.rows.shape[0], x.shape[1]))
    after = torch.empty_like(windows, dtype=x.dtype)
    conv_prompt(x, weight, bias, windows, out, after, rows, is_silu=activation is not None).launch()
    return out, after
