"""State-space layers of Mamba, as Jamba, Falcon-Mamba and Mamba itself have them.

The rates of the scan depend on the result of the convolution, so these are two ops with projections between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.state_layers import ops as _ops  # noqa: F401  (registers the ops)

_CHILDREN = frozenset({"conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"})
_NORMS = frozenset({"dt_layernorm", "b_layernorm", "c_layernorm"})


class Mamba(nn.Module):
    """The forward of such a layer on a flattened batch; an instance is a module of transformers with this class.

    Each channel is a head of size 1.
    """

    def forward(
        self, hidden_states: torch.Tensor, cache_params: None = None, attention_mask: None = None, **kwargs: object
    ) -> torch.Tensor:
        """Return the layer's output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape."""
        this: Any = self
        x, gate = this.in_proj(hidden_states.squeeze(0)).chunk(2, dim=-1)
        convolved = torch.empty_like(x, memory_format=torch.contiguous_format)
        conv = this.conv1d
        torch.ops.piecegraph.short_conv.default(
            x.contiguous(), conv.weight.squeeze(1), conv.bias, "silu", convolved, getattr(conv, NAME_ATTRIBUTE)
        )
        dt, b, c = this._normed(
            *this.x_proj(convolved).split([this.time_step_rank, this.ssm_state_size, this.ssm_state_size], dim=-1)
        )
        dt = F.softplus(F.linear(dt, this.dt_proj.weight) + this.dt_proj.bias.float())
        out = torch.empty_like(convolved).unsqueeze(-1)
        torch.ops.piecegraph.mamba_mixer.default(
            torch.cat([convolved, b, c], dim=-1),
            dt,
            -torch.exp(this.A_log.float()),
            this.D,
            None,
            None,
            out,
            1,
            this.ssm_state_size,
            getattr(this, NAME_ATTRIBUTE),
        )
        output: torch.Tensor = this.out_proj(out.squeeze(-1) * F.silu(gate))
        return output.unsqueeze(0)

    def _normed(self, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return dt, b, c


class NormedMamba(Mamba):
    """The layer with norms of the three results of its inner projection."""

    def _normed(self, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        return this.dt_layernorm(dt), this.b_layernorm(b), this.c_layernorm(c)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    children = set(module._modules) - {"act"}
    if set(module._parameters) != {"A_log", "D"} or not children >= _CHILDREN:
        return None
    kind = {frozenset(): Mamba, _NORMS: NormedMamba}.get(frozenset(children - _CHILDREN))
    conv: Any = module.conv1d
    size, states = module.A_log.shape if module.A_log.dim() == 2 else (0, 0)
    is_alike = (
        getattr(module, "activation", None) == "silu"
        and getattr(module, "ssm_state_size", None) == states
        and isinstance(conv, nn.Conv1d)
        and conv.weight.shape[:2] == (size, 1)
        and module.D.shape == (size,)
        and module.dt_proj.weight.shape == (size, getattr(module, "time_step_rank", None))
        and module.dt_proj.bias is not None
        and module.in_proj.weight.shape[0] == 2 * size
        and module.x_proj.weight.shape[0] == module.time_step_rank + 2 * states
    )
    return kind if is_alike else None
