"""Linear attention whose state decays by a fixed rate a head (https://arxiv.org/abs/2401.04658), as MiniMax has it.

A token changes the state to `exp(-slope) S + k v^T` and reads `q S`: the scan of Mamba-2 with steps of 1, whose B is
the key, whose C is the query, and which adds nothing of its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.state_layers import ops as _ops  # noqa: F401  (registers the op)

_DECAY = frozenset({"slope_rate", "query_decay", "key_decay", "diagonal_decay"})


class LightningAttention(nn.Module):
    """The forward of such a layer on a flattened batch; an instance is a module of transformers with this class."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the layer's output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        heads, dim = this.num_attention_heads, this.head_dim
        hidden = hidden_states.squeeze(0)
        query, key, value = this.act_fn(this.qkv_proj(hidden)).view(-1, heads, 3, dim).unbind(2)
        mixed = torch.cat([each.flatten(1) for each in (value, key, query)], dim=-1)
        slopes = this.slope_rate.view(heads)
        out = mixed.new_empty((mixed.shape[0], heads, dim))
        torch.ops.piecegraph.mamba_mixer.default(
            mixed,
            mixed.new_ones((mixed.shape[0], heads)),
            -slopes.float(),
            torch.zeros_like(slopes),
            None,
            None,
            out,
            heads,
            dim,
            getattr(this, NAME_ATTRIBUTE),
        )
        output: torch.Tensor = this.out_proj(F.sigmoid(this.output_gate(hidden)) * this.norm(out.flatten(1)))
        return output.unsqueeze(0), None


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._buffers) != _DECAY or module._parameters:
        return None
    if set(module._modules) != {"act_fn", "norm", "qkv_proj", "out_proj", "output_gate"}:
        return None
    heads, dim = getattr(module, "num_attention_heads", None), getattr(module, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(dim, int) or module.slope_rate.numel() != heads:
        return None
    width = heads * dim
    is_alike = module.qkv_proj.out_features == 3 * width == 3 * module.output_gate.out_features
    return LightningAttention if is_alike and module.out_proj.in_features == width else None
