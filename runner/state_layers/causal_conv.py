"""A causal convolution over the tokens of each channel, continued from its last inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = {"silu": F.silu, "swish": F.silu}
"""The activations that a convolution may end with."""


def causal_conv(
    x: torch.Tensor,  # [batch, num_tokens, channels]
    state: torch.Tensor,  # [batch, channels, kernel_size - 1]: the inputs before them, zeros before the first
    weight: torch.Tensor,  # [channels, kernel_size]
    bias: torch.Tensor | None,  # [channels]
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution of `x`, of its shape, and the state after its last token."""
    inputs = torch.cat([state.to(x.dtype), x.transpose(1, 2)], dim=-1)
    out = F.conv1d(inputs.to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out.to(x.dtype).transpose(1, 2), inputs[..., x.shape[1] :]
