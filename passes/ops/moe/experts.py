"""The op `piecegraph::moe_experts`: the routed experts of a mixture, from a token's choice of experts to its result."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.act_mul import ACTIVATIONS
from piecegraph.passes.ops.library import define_op


def moe_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    num_all_experts: int | None = None,
) -> torch.Tensor:
    """Return the sum over each token's experts `e` of `weight * down[e] @ (act(gate_e @ x) * up_e @ x)`.

    `x` is `[num_tokens, hidden]`; `topk_weights` (floats) and `topk_ids` (integers) are `[num_tokens, top_k]`; an id
    outside of 0 to `num_experts - 1` is that of an expert elsewhere, which counts for nothing, whatever its weight.
    `gate_up` is `[num_experts, 2 * size, hidden]`, gate rows first, and `down` `[num_experts, hidden, size]`, both of
    `x`'s dtype with any strides; `activation` is a name in `act_mul.ACTIVATIONS`. `num_all_experts` is how many experts
    tokens choose among, those elsewhere included, by which the kernels' layout is chosen; None: those here. Sums
    accumulate in float32. The input of the second product is rounded to `x`'s dtype, and so is the result, after
    weights and the sum over experts; on a GPU the results of many rows in bfloat16 are rounded before that sum, too
    (`MoeConfig.results_dtype`). The result is a new contiguous tensor like `x`.

    No shape depends on the choice of experts, and nothing waits for the device, so the op can be captured in a CUDA
    graph.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

        return moe_experts_on_gpu(x, topk_weights, topk_ids, gate_up, down, activation, num_all_experts)
    return moe_experts_reference(x, topk_weights, topk_ids, gate_up, down, activation)


def moe_experts_reference(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return what the kernels compute, in plain torch: every expert sees every token, and unchosen ones count for
    nothing."""
    wide = torch.promote_types(x.dtype, torch.float32)
    result = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(gate_up.shape[0]):
        is_chosen = topk_ids == expert  # [num_tokens, top_k], at most one a token
        weight = torch.where(is_chosen, topk_weights.to(wide), 0.0).sum(-1, keepdim=True)
        gate, up = (x.to(wide) @ gate_up[expert].to(wide).t()).chunk(2, -1)
        inner = (ACTIVATIONS[activation](gate) * up).to(x.dtype).to(wide)
        output = inner @ down[expert].to(wide).t()
        # Not a product with 0: what overflows in an expert that a token did not choose is not the token's.
        result += torch.where(is_chosen.any(-1, keepdim=True), output * weight, 0.0)
    return result.to(x.dtype)


MOE_EXPERTS = define_op(
    "moe_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor gate_up, Tensor down, str activation, "
    "int? num_all_experts=None) -> Tensor",
    moe_experts,
    lambda x, topk_weights, topk_ids, gate_up, down, activation, num_all_experts=None: x.new_empty(x.shape),
)
