"""Prompts on a GPU: the convolutions of a batch of segments run as one Triton kernel, without transposed copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from piecegraph.runner.state_layers.libraries.segments import RaggedRows

ConvolveRows = Callable[[torch.Tensor, torch.Tensor, RaggedRows], tuple[Sequence[torch.Tensor], torch.Tensor]]
"""A function from `[num_tokens, channels]` and the windows before a batch's segments to the convolution of its rows,
`[num_rows, channels]` in the parts that the layer's recurrence takes, and the windows after them."""


def runs_kernels(x: torch.Tensor) -> bool:
    """Return whether the convolutions of prompts run as a kernel."""
    return x.is_cuda


def convolution_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, parts: Sequence[int] = ()
) -> ConvolveRows | None:
    """Return what convolves the segments of prompts of `x`, a layer's input; None: torch, one after the other.

    `parts`: the channels of each part; empty: one part.
    """
    if not runs_kernels(x):
        return None
    return partial(_convolve, weight=weight, bias=bias, activation=activation, parts=parts)


def _convolve(
    x: torch.Tensor,
    windows: torch.Tensor,
    rows: RaggedRows,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    parts: Sequence[int],
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    from piecegraph.runner.state_layers.kernels.prompt_calls import conv_prompt, written_parts

    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    bias, windows = None if bias is None else bias.contiguous(), windows.contiguous()
    out = x.new_empty((rows.rows.shape[0], x.shape[1]))
    after = torch.empty_like(windows, dtype=x.dtype)
    written = parts if written_parts(parts) else ()
    conv_prompt(x, weight, bias, windows, out, after, rows, is_silu=activation is not None, parts=written).launch()
    if written:
        sizes = [out.shape[0] * count for count in written]
        flat = out.view(-1).split(sizes)
        return [each.view(-1, count) for each, count in zip(flat, written, strict=True)], after
    return (out.split(list(parts), dim=1) if parts else (out,)), after
