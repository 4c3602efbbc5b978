"""Experts of a mixture that a module runs in a loop, which is no graph: over those that some token chose, or by counts.

They are computed as transformers' `grouped_mm` form of experts does: pairs of token and expert are sorted by expert,
and the rows of each are multiplied together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class GatedExperts(nn.Module):
    """The experts of DBRX, whose weights lie in the rows of a matrix each; an instance is a module of transformers."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        top_k_index: torch.Tensor,  # [1, num_tokens, top_k] or [num_tokens, top_k]
        top_k_weights: torch.Tensor,  # of its shape
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' results by their weights, of the shape of `hidden_states`."""
        this: Any = self
        mlp, size = this.mlp, this.ffn_hidden_size
        shape = (this.num_experts, size, this.hidden_size)
        hidden = hidden_states.view(-1, this.hidden_size)
        chosen = _Chosen(top_k_index.view(-1, top_k_index.shape[-1]), this.num_experts)
        rows = chosen.rows_of(hidden)
        gate = chosen.product(rows, mlp.w1.view(shape).transpose(1, 2))
        up = chosen.product(rows, mlp.v1.view(shape).transpose(1, 2))
        results = chosen.product(mlp.activation_fn(gate) * up, mlp.w2.view(shape))
        return chosen.sum(results, top_k_weights).view(hidden_states.shape)


class ZeroExperts(nn.Module):
    """The experts of LongCat, of which the last return their input; an instance is a module of transformers."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        top_k_index: torch.Tensor,  # [num_tokens, top_k]
        top_k_weights: torch.Tensor,  # of its shape
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' results by their weights, of the shape of `hidden_states`."""
        this: Any = self
        is_zero = top_k_index >= this.num_routed_experts
        chosen = _Chosen(top_k_index.clamp(max=this.num_routed_experts - 1), this.num_routed_experts)
        rows = chosen.rows_of(hidden_states)
        gate, up = chosen.product(rows, this.gate_up_proj[: this.num_routed_experts].transpose(1, 2)).chunk(2, dim=-1)
        results = chosen.product(this.act_fn(gate) * up, this.down_proj.transpose(1, 2))
        routed = chosen.sum(results, top_k_weights.masked_fill(is_zero, 0.0))
        kept = top_k_weights.masked_fill(~is_zero, 0.0).sum(dim=-1, keepdim=True)
        return routed + (hidden_states * kept).to(hidden_states.dtype)


class ProductByExpert(nn.Module):
    """The product of rows sorted by expert with their experts' matrices, as in Aria, whose code reads the counts on the
    host; an instance is a module of transformers."""

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  [num_rows, in_features]
        tokens_per_expert: torch.Tensor,  # [num_experts] int64
    ) -> torch.Tensor:
        """Return `[num_rows, out_features]`."""
        return _grouped_product(input, self._parameters["weight"], tokens_per_expert.cumsum(0).to(torch.int32))


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if it is of another kind."""
    sizes: list[Any] = [getattr(module, name, None) for name in ("num_experts", "ffn_hidden_size", "hidden_size")]
    if set(module._modules) == {"mlp"} and not module._parameters and all(isinstance(size, int) for size in sizes):
        parameters = module.mlp._parameters
        shape = (sizes[0] * sizes[1], sizes[2])
        is_alike = set(parameters) == {"w1", "v1", "w2"} and all(each.shape == shape for each in parameters.values())
        return GatedExperts if is_alike and hasattr(module.mlp, "activation_fn") else None
    num_routed, num_zero = (getattr(module, name, None) for name in ("num_routed_experts", "zero_expert_num"))
    if set(module._parameters) == {"gate_up_proj", "down_proj"} and isinstance(num_zero, int) and num_routed:
        is_identity = isinstance(module._modules.get("identity_expert"), nn.Identity)
        is_alike = is_identity and module.gate_up_proj.shape[0] == num_routed + num_zero
        return ZeroExperts if is_alike and module.down_proj.shape[0] == num_routed else None
    of_weight = tuple(getattr(module, name, None) for name in ("groups", "in_features", "out_features"))
    if set(module._parameters) == {"weight"} and not module._modules and tuple(module.weight.shape) == of_weight:
        return ProductByExpert
    return None


def _grouped_product(rows: torch.Tensor, weights: Any, ends: torch.Tensor) -> torch.Tensor:
    """Return rows sorted by expert times their experts' matrices; `ends` `[num_experts]` int32 lie behind them."""
    from transformers.integrations.moe import _grouped_mm

    product: torch.Tensor = _grouped_mm(rows, weights, ends)
    return product


class _Chosen:
    """The experts that each token chose, `[num_tokens, top_k]`, sorted."""

    def __init__(self, ids: torch.Tensor, num_experts: int) -> None:
        self.top_k = ids.shape[-1]
        ids, self.order = torch.sort(ids.reshape(-1))
        experts = torch.arange(num_experts, device=ids.device)
        self.ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)  # of each expert's pairs

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` `[num_tokens, size]` for each pair of token and expert, by expert."""
        return x[self.order // self.top_k]

    def product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the rows times the matrices of their experts, `weights` `[num_experts, size, other_size]`."""
        return _grouped_product(rows, weights, self.ends)

    def sum(self, results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return for each token the sum of its experts' `results` by their `weights`."""
        scaled = results * weights.reshape(-1)[self.order].unsqueeze(-1)
        restored = torch.empty_like(scaled).index_copy(0, self.order, scaled)
        return restored.view(-1, self.top_k, results.shape[-1]).sum(dim=1).to(results.dtype)
