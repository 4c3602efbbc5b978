"""Layers with a gated delta net, as Qwen3-Next, Qwen3.5, OLMo-Hybrid and Kimi-Linear have them.

All are projections, the op, and a gated norm; they differ in their projections, and in what the decay is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE
from piecegraph.runner.state_layers import ops as _ops  # noqa: F401  (registers the op)

_RATES = frozenset({"dt_bias", "A_log"})
_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_SIZES = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")


class GatedDeltaNet(nn.Module):
    """The forward of such a layer on a flattened batch; an instance is a module of transformers with this class."""

    def forward(
        self, hidden_states: torch.Tensor, cache_params: None = None, attention_mask: None = None, **kwargs: object
    ) -> torch.Tensor:
        """Return the layer's output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape."""
        this: Any = self
        hidden = hidden_states.squeeze(0)
        num_k_heads, head_k_dim, num_v_heads, head_v_dim = this._sizes()
        mixed, gate, beta, decay = this._projected(hidden)
        out = hidden.new_empty((hidden.shape[0], num_v_heads, head_v_dim))
        torch.ops.piecegraph.linear_attention.default(
            mixed,
            decay,
            beta,
            this.conv1d.weight.squeeze(1),
            None,
            out,
            num_k_heads,
            head_k_dim,
            head_k_dim**-0.5,
            getattr(this, NAME_ATTRIBUTE),
        )
        output: torch.Tensor = this._gated(out, gate.reshape(-1, num_v_heads, head_v_dim))
        return output.unsqueeze(0)

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return the number and the size of key heads, and those of value heads."""
        this: Any = self
        return this.num_k_heads, this.head_k_dim, this.num_v_heads, this.head_v_dim

    def _decay(self, a: torch.Tensor) -> torch.Tensor:
        this: Any = self
        decay: torch.Tensor = -this.A_log.float().exp() * F.softplus(a.float() + this.dt_bias)
        return decay

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        this: Any = self
        normed: torch.Tensor = this.norm(out.flatten(0, 1), gate.flatten(0, 1))
        output: torch.Tensor = this.out_proj(normed.view(out.shape[0], -1))
        return output


class SeparateGatedDeltaNet(GatedDeltaNet):
    """The layer of Qwen3.5: a projection for query, key and value together, one for the gate, one for each rate."""

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        mixed, gate = this.in_proj_qkv(hidden), this.in_proj_z(hidden)
        return mixed, gate, this.in_proj_b(hidden).sigmoid(), this._decay(this.in_proj_a(hidden))


class MergedGatedDeltaNet(GatedDeltaNet):
    """The layer of Qwen3-Next: merged projections, whose outputs are sorted by key head."""

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        num_k_heads, repeats = this.num_k_heads, this.num_v_heads // this.num_k_heads
        values = repeats * this.head_v_dim
        qkvz = this.in_proj_qkvz(hidden).view(hidden.shape[0], num_k_heads, -1)
        query, key, value, gate = qkvz.split([this.head_k_dim, this.head_k_dim, values, values], dim=-1)
        b, a = this.in_proj_ba(hidden).view(hidden.shape[0], num_k_heads, -1).split([repeats, repeats], dim=-1)
        mixed = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
        return mixed, gate, b.flatten(1).sigmoid(), this._decay(a.flatten(1))


class UnmergedGatedDeltaNet(GatedDeltaNet):
    """The layer of OLMo-Hybrid: a projection for each; the rate may be doubled, for negative eigenvalues."""

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        mixed = torch.cat([this.q_proj(hidden), this.k_proj(hidden), this.v_proj(hidden)], dim=-1)
        beta = this.b_proj(hidden).sigmoid()
        if this.allow_neg_eigval:
            beta = beta * 2.0
        return mixed, this.g_proj(hidden), beta, this._decay(this.a_proj(hidden))

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        this: Any = self
        normed: torch.Tensor = this.o_norm(out.flatten(0, 1), gate.flatten(0, 1))
        output: torch.Tensor = this.o_proj(normed.view(out.shape[0], -1))
        return output


class KimiDeltaAttention(GatedDeltaNet):
    """The layer of Kimi-Linear: every channel of a key has a decay of its own."""

    def _sizes(self) -> tuple[int, int, int, int]:
        this: Any = self
        return this.num_heads, this.head_dim, this.num_heads, this.head_dim

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        this: Any = self
        mixed = torch.cat([this.q_proj(hidden), this.k_proj(hidden), this.v_proj(hidden)], dim=-1)
        gate, beta = this.g_b_proj(this.g_a_proj(hidden)), this.b_proj(hidden).sigmoid()
        return mixed, gate, beta, this.forget_gate(hidden.unsqueeze(0)).squeeze(0)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        this: Any = self
        normed: torch.Tensor = this.o_norm(out, gate)
        output: torch.Tensor = this.o_proj(normed.flatten(1))
        return output


_STRUCTURES: Mapping[frozenset[str], type[GatedDeltaNet]] = {
    frozenset({"norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}): SeparateGatedDeltaNet,
    frozenset({"norm", "out_proj", "in_proj_qkvz", "in_proj_ba"}): MergedGatedDeltaNet,
    _QKV | {"a_proj", "b_proj", "g_proj", "o_norm", "o_proj"}: UnmergedGatedDeltaNet,
    _QKV | {"forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj"}: KimiDeltaAttention,
}
"""By the submodules besides the convolution, the class that runs such a layer."""


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    kind = _STRUCTURES.get(frozenset(module._modules) - {"conv1d", "act"})
    conv = module._modules.get("conv1d")
    if kind is None or not isinstance(conv, nn.Conv1d) or getattr(module, "activation", None) != "silu":
        return None
    if kind is KimiDeltaAttention:
        rates = module.forget_gate
        if set(rates._modules) != {"f_a_proj", "f_b_proj"} or module._parameters or set(rates._parameters) != _RATES:
            return None
        num_k_heads = num_v_heads = module.num_heads
        head_k_dim = head_v_dim = module.head_dim
        has_rates = rates.A_log.numel() == num_v_heads and rates.dt_bias.shape == (num_v_heads * head_k_dim,)
    else:
        if set(module._parameters) != _RATES or not all(hasattr(module, size) for size in _SIZES):
            return None
        num_k_heads, head_k_dim, num_v_heads, head_v_dim = (getattr(module, size) for size in _SIZES)
        has_rates = module.A_log.shape == module.dt_bias.shape == (num_v_heads,)
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    norm = module._modules.get("norm", module._modules.get("o_norm"))
    is_alike = (
        has_rates
        and conv.bias is None
        and conv.weight.shape[:2] == (channels, 1)
        and num_v_heads % num_k_heads == 0
        and norm is not None
        and [parameter.shape for parameter in norm._parameters.values() if parameter is not None] == [(head_v_dim,)]
    )
    return kind if is_alike else None
