"""The op `piecegraph::int8_layer_linears`: all that is between two calls of attention, over int8 weights."""

from __future__ import annotations

import torch

from piecegraph.passes.kernels.cpu.int8_layer import Layer, Linear, Norm, add_and_norm, gate_rows, int8_layer
from piecegraph.passes.ops.act_mul import act_mul
from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised.int8_linear import int8_linear
from piecegraph.passes.ops.rms_norm import add_rms_norm


def int8_layer_linears(
    x: torch.Tensor,
    residual: torch.Tensor,
    out_weight: torch.Tensor,
    out_scale: torch.Tensor,
    out_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_offset: float,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    next_norm_weight: torch.Tensor | None,
    next_norm_eps: float,
    next_norm_offset: float,
    next_weight: torch.Tensor,
    next_scale: torch.Tensor,
    next_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next projection of a layer's result, and that result.

    With `linear` for `int8_linear`: `total = linear(x, out) + residual`; the result is `linear(act, down) + total`,
    where `act` is `silu(gate) * up` of the halves of `linear(norm(total), gate_up)`; the first return value is
    `linear(next_norm(result), next)`. Norms are `rms_norm`'s. `x` is `[..., size]` and `residual` `[..., hidden]`, both
    float32 or bfloat16; both results are new and contiguous, and nothing is mutated.

    On a CPU that has our kernel, all of it is one call; otherwise it is computed step by step.
    """
    layer = Layer(
        Linear(out_weight, out_scale, out_bias),
        Norm(norm_weight, norm_eps, norm_offset),
        Linear(gate_up_weight, gate_up_scale, gate_up_bias),
        Linear(down_weight, down_scale, down_bias),
        Norm(next_norm_weight, next_norm_eps, next_norm_offset),
        Linear(next_weight, next_scale, next_bias),
    )
    if x.is_cpu and (at_once := int8_layer(x, residual, layer)) is not None:
        return at_once
    normed, total = _add_and_norm(int8_linear(x, *layer.out), residual, layer.norm)
    gate_up = int8_linear(normed, *layer.gate_up)
    product = gate_rows(gate_up) if gate_up.is_cpu else None
    if product is None:
        product = act_mul(gate_up, "silu")
    normed, result = _add_and_norm(int8_linear(product, *layer.down), total, layer.next_norm)
    return int8_linear(normed, *layer.next), result


def _add_and_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    by_kernel = add_and_norm(x, residual, norm) if x.is_cpu else None
    return add_rms_norm(x, residual, *norm) if by_kernel is None else by_kernel


_LINEAR = "Tensor {0}_weight, Tensor {0}_scale, Tensor? {0}_bias"
_NORM = "Tensor? {0}_weight, float {0}_eps, float {0}_offset"
_ARGUMENTS = ", ".join(
    text.format(name)
    for text, name in (
        (_LINEAR, "out"),
        (_NORM, "norm"),
        (_LINEAR, "gate_up"),
        (_LINEAR, "down"),
        (_NORM, "next_norm"),
        (_LINEAR, "next"),
    )
)

INT8_LAYER_LINEARS = define_op(
    f"int8_layer_linears(Tensor x, Tensor residual, {_ARGUMENTS}) -> (Tensor, Tensor)",
    int8_layer_linears,
    lambda x, residual, *layer: (x.new_empty((*x.shape[:-1], layer[-3].shape[0])), residual.new_empty(residual.shape)),
    is_recordable=True,
)
