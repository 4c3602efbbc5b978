"""Layers with a gated short convolution, as LFM2 has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.state_layers import ops as _ops  # noqa: F401  (registers the op)


class GatedShortConv(nn.Module):
    """The forward of such a layer on a flattened batch; an instance is a module of transformers with this class."""

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: None = None, attention_mask: None = None, **kwargs: object
    ) -> torch.Tensor:
        """Return the layer's output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape."""
        this: Any = self
        before, after, x = this.in_proj(hidden_states.squeeze(0)).chunk(3, dim=-1)
        x = before * x
        out = torch.empty_like(x)
        torch.ops.piecegraph.short_conv.default(
            x, this.conv.weight.squeeze(1), this.conv.bias, None, out, getattr(this, NAME_ATTRIBUTE)
        )
        output: torch.Tensor = this.out_proj(after * out)
        return output.unsqueeze(0)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != {"conv", "in_proj", "out_proj"} or module._parameters:
        return None
    conv, hidden_size = module.conv, getattr(module.in_proj, "in_features", 0)
    is_alike = (
        isinstance(conv, nn.Conv1d)
        and conv.weight.shape[:2] == (hidden_size, 1)
        and getattr(module.in_proj, "out_features", 0) == 3 * hidden_size
    )
    return GatedShortConv if is_alike else None
