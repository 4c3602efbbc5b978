"""Random inputs of `moe_experts`, and what they come to in other ways of computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from piecegraph.passes.ops.act_mul import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class MoeInputs:
    """Operands of `piecegraph::moe_experts`, in its order."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str = "silu"

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str]:
        return self.x, self.topk_weights, self.topk_ids, self.gate_up, self.down, self.activation

    def to(self, dtype: torch.dtype) -> MoeInputs:
        """Floats in `dtype`."""
        floats = {name: getattr(self, name).to(dtype) for name in ("x", "topk_weights", "gate_up", "down")}
        return replace(self, **floats)


def moe_inputs(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    activation: str = "silu",
    among: Sequence[int] | None = None,
    device: str = "cpu",
) -> MoeInputs:
    """Every token draws different experts, `among` some of them or all; weights are float32 and sum to 1."""
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device)

    logits = normal(num_tokens, num_experts)
    if among is not None:
        is_out = torch.ones(num_experts, dtype=torch.bool, device=device)
        is_out[list(among)] = False
        logits[:, is_out] = float("-inf")
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return MoeInputs(
        x=normal(num_tokens, hidden).to(dtype),
        topk_weights=weights / weights.sum(-1, keepdim=True),
        topk_ids=ids,
        gate_up=(normal(num_experts, 2 * size, hidden) / hidden**0.5).to(dtype),
        down=(normal(num_experts, hidden, size) / size**0.5).to(dtype),
        activation=activation,
    )


def exact(inputs: MoeInputs) -> torch.Tensor:
    """Return the result in float64, with nothing rounded in between."""
    return unfused(inputs.to(torch.float64))


def unfused(inputs: MoeInputs) -> torch.Tensor:
    """As transformers' `grouped_mm` form rounds: after each product, the activation, gate times up, and the weight
    (in the dtype that the weight has). The weights of every pair of token and expert are gathered."""
    gate_up = (inputs.gate_up[inputs.topk_ids] @ inputs.x[:, None, :, None]).squeeze(-1)
    gate, up = gate_up.chunk(2, -1)  # [num_tokens, top_k, size]
    inner = ACTIVATIONS[inputs.activation](gate) * up
    output = (inputs.down[inputs.topk_ids] @ inner.unsqueeze(-1)).squeeze(-1)
    return (output * inputs.topk_weights.unsqueeze(-1)).sum(1).to(inputs.x.dtype)


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
