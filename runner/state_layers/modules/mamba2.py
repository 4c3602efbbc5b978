"""State-space layers of Mamba-2, as Bamba, Granite 4, Falcon-H1, Nemotron-H and Mamba-2 itself have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.state_layers import ops as _ops  # noqa: F401  (registers the op)

_SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim", "time_step_limit")


class Mamba2(nn.Module):
    """The forward of such a layer on a flattened batch; an instance is a module of transformers with this class."""

    def forward(
        self, hidden_states: torch.Tensor, cache_params: None = None, attention_mask: None = None, **kwargs: object
    ) -> torch.Tensor:
        """Return the layer's output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape."""
        this: Any = self
        gate, mixed, dt = this._projected(hidden_states.squeeze(0)).split(
            [this.intermediate_size, this.conv_dim, this.num_heads], dim=-1
        )
        dt = F.softplus(dt + this.dt_bias.to(dt.dtype)).clamp(*this.time_step_limit)
        out = mixed.new_empty((mixed.shape[0], this.num_heads, this.head_dim))
        torch.ops.piecegraph.mamba_mixer.default(
            mixed.contiguous(),
            dt,
            -torch.exp(this.A_log.float()),
            this.D,
            this.conv1d.weight.squeeze(1),
            this.conv1d.bias,
            out,
            this.n_groups,
            this.ssm_state_size,
            getattr(this, NAME_ATTRIBUTE),
        )
        output: torch.Tensor = this.out_proj(this._gated(out.flatten(1), gate))
        return output.unsqueeze(0)

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        this: Any = self
        projected: torch.Tensor = this.in_proj(hidden)
        return projected

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        this: Any = self
        normed: torch.Tensor = this.norm(out, gate)
        return normed


class ScaledMamba2(Mamba2):
    """The layer whose inputs and projections are scaled, and which may have a gate without a norm."""

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        this: Any = self
        projected: torch.Tensor = this.in_proj(hidden * this.ssm_in_multiplier) * this.mup_vector.view(-1)
        return projected

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        this: Any = self
        gated: torch.Tensor = this.norm(out, gate) if this.mamba_rms_norm else out * F.silu(gate)
        return gated


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    children = set(module._modules) - {"act"}
    if set(module._parameters) != {"dt_bias", "A_log", "D"} or children != {"conv1d", "in_proj", "norm", "out_proj"}:
        return None
    if not all(hasattr(module, size) for size in _SIZES) or getattr(module, "activation", None) != "silu":
        return None
    conv, num_heads, groups = module.conv1d, module.num_heads, module.n_groups * module.ssm_state_size
    is_alike = (
        isinstance(conv, nn.Conv1d)
        and module.conv_dim == module.intermediate_size + 2 * groups
        and module.intermediate_size == num_heads * module.head_dim
        and conv.weight.shape[:2] == (module.conv_dim, 1)
        and module.A_log.shape == module.D.shape == module.dt_bias.shape == (num_heads,)
        and getattr(module.in_proj, "out_features", 0) == module.intermediate_size + module.conv_dim + num_heads
        and num_heads % module.n_groups == 0
    )
    if not is_alike:
        return None
    return ScaledMamba2 if hasattr(module, "ssm_in_multiplier") else Mamba2
