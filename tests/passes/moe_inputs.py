"""Random inputs of `moe_experts`, and what they come to in other ways of computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

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
    """In float64, pair by pair, nothing rounded in between."""
    wide = inputs.to(torch.float64)
    result = torch.zeros_like(wide.x)
    for token, (ids, weights) in enumerate(zip(wide.topk_ids.tolist(), wide.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = F.linear(wide.x[token], wide.gate_up[expert]).chunk(2)
            result[token] += weight * F.linear(ACTIVATIONS[wide.activation](gate) * up, wide.down[expert])
    return result


def unfused(inputs: MoeInputs) -> torch.Tensor:
    """As transformers' `grouped_mm` form rounds: after each product, the activation, gate times up, and the weight
    (in the dtype that the weight has)."""
    result = []
    for token, ids in enumerate(inputs.topk_ids.tolist()):
        weighted = []
        for expert, weight in zip(ids, inputs.topk_weights[token], strict=True):
            gate, up = F.linear(inputs.x[token], inputs.gate_up[expert]).chunk(2)
            output = F.linear(ACTIVATIONS[inputs.activation](gate) * up, inputs.down[expert])
            weighted.append(output * weight.to(torch.promote_types(output.dtype, inputs.topk_weights.dtype)))
        result.append(torch.stack(weighted).sum(0))
    return torch.stack(result).to(inputs.x.dtype)


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
