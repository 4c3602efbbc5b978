"""The op `piecegraph::quantised_experts`: the routed experts of a mixture whose weights are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.moe.stored_experts import CLAMPED_SWIGLU, Gate, Stored
from piecegraph.passes.ops.act_mul import ACTIVATIONS
from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised import mxfp4
from piecegraph.passes.ops.quantised.fp8_linear import fp8_linear
from piecegraph.passes.ops.quantised.grouped_linear import grouped_linear
from piecegraph.passes.ops.quantised.int8_inputs_linear import int8_inputs_linear
from piecegraph.passes.ops.quantised.int8_linear import int8_linear
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, rounded_reference


def gated(gate: Gate, gate_up: torch.Tensor) -> torch.Tensor:
    """Return the gated activation `[..., size]` of `gate_up`, `[..., 2 * size]`, in its dtype."""
    gates, ups = (gate_up[..., ::2], gate_up[..., 1::2]) if gate.is_interleaved else gate_up.chunk(2, -1)
    if gate.activation != CLAMPED_SWIGLU:
        return ACTIVATIONS[gate.activation](gates) * ups
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return (ups + 1) * gates * torch.sigmoid(gate.alpha * gates)


def quantised_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_block: Sequence[int],
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_block: Sequence[int],
    inputs: str,
    activation: str,
    is_interleaved: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Return the sum over each token's experts of `weight * (down @ gated(gate_up @ x + bias) + bias)`.

    `x` is `[num_tokens, hidden]`, bfloat16 or float32. `topk_weights` (floats) and `topk_ids` (integers) are
    `[num_tokens, top_k]`; an id of `num_experts` or more is an expert of another rank and counts for nothing. `Stored`
    has the shapes of the two projections, of `2 * size` rows and of `hidden` rows, and `Gate` what follows the first.
    `inputs` of both products: "floats" stay, "tokens" are rounded as the weights are (int8 or e4m3) with a scale for
    each token, "groups" to e4m3 with a scale for each group of a block's columns. The input of the second product is
    in the dtype of `x` before that. Sums over experts are in float32. A new tensor like `x`; nothing is mutated.

    On a CPU the weights of those experts that a token chose become floats, one expert at a time at most. On a GPU no
    shape depends on the choice and nothing waits for the device, so the op can be captured in a CUDA graph.
    """
    first, second = (
        Stored(gate_up, gate_up_scale, gate_up_bias, gate_up_block),
        Stored(down, down_scale, down_bias, down_block),
    )
    gate = Gate(activation, is_interleaved, alpha, limit)
    if x.is_cuda:
        from piecegraph.passes.kernels.moe.quantised_experts import quantised_experts_on_gpu

        rounded_x, round_inner = rounded(x, first, inputs), partial(rounded, weights=second, inputs=inputs)
        found = quantised_experts_on_gpu(rounded_x, topk_weights, topk_ids, first, second, gate, round_inner)
        if found is not None:
            return found
    return quantised_experts_reference(x, topk_weights, topk_ids, first, second, inputs, gate)


def quantised_experts_reference(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    inputs: str,
    gate: Gate,
) -> torch.Tensor:
    """Return what the kernels compute, in plain torch, one expert after another.

    On a GPU every expert computes every token, because reading which were chosen would wait for the device.
    """
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    num_experts = gate_up.values.shape[0]
    for expert in range(num_experts) if x.is_cuda else topk_ids.unique().tolist():
        if expert >= num_experts:
            continue
        is_chosen = topk_ids == expert  # [num_tokens, top_k], at most one a token
        has_chosen = is_chosen.any(-1)
        tokens = slice(None) if x.is_cuda else has_chosen.nonzero().squeeze(-1)
        weight = torch.where(is_chosen, topk_weights.float(), 0.0).sum(-1)[tokens].unsqueeze(-1)
        inner = gated(gate, _product(x[tokens], gate_up.of(expert), inputs).float()).to(x.dtype)
        output = _product(inner, down.of(expert), inputs).float() * weight
        # Not a product with 0, which would turn an overflow in an expert that was not chosen into NaN.
        result[tokens] += torch.where(has_chosen[tokens].unsqueeze(-1), output, 0.0)
    return result.to(x.dtype)


def _product(x: torch.Tensor, weights: Stored, inputs: str) -> torch.Tensor:
    """Return `x @ weight.T + bias` for the weights of one expert, by the op for linears that are stored this way."""
    values, scale, bias, block = weights
    if scale.dtype is torch.uint8:
        return F.linear(x, mxfp4.dequantised(values, scale, x.dtype), bias)
    if values.dtype is torch.float8_e4m3fn:
        return fp8_linear(x, values, scale, bias, block, input_group(inputs, block))
    if inputs == "tokens":
        return int8_inputs_linear(x, values, scale, bias)
    if scale.ndim == 1:
        return int8_linear(x, values, scale, bias)
    return grouped_linear(x, values, scale, bias)


def input_group(inputs: str, block: Sequence[int]) -> int:
    """Return the `input_group` of `fp8_linear`."""
    return {"floats": 0, "tokens": WHOLE_TOKEN, "groups": block[1]}[inputs]


def rounded(x: torch.Tensor, weights: Stored, inputs: str) -> torch.Tensor:
    """Return the numbers `[num_rows, size]` that an input is rounded to, in its own dtype."""
    if inputs == "floats":
        return x
    size = x.shape[1]
    length = weights.block[1] if inputs == "groups" else size
    values, step = rounded_reference(x, length, weights.values.dtype)
    return (values.float() * step.repeat_interleave(length, 1)[:, :size]).to(x.dtype)


QUANTISED_EXPERTS = define_op(
    "quantised_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor? gate_up_bias, int[] gate_up_block, Tensor down, Tensor down_scale, Tensor? down_bias, int[] down_block, "
    "str inputs, str activation, bool is_interleaved, float alpha, float limit) -> Tensor",
    quantised_experts,
    lambda x, *others: x.new_empty(x.shape),
)
