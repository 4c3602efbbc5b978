"""The op `piecegraph::act_mul`: the gated activation of an MLP whose gate and up projection are one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.library import define_op

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""The activations, by the name that the op takes."""


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `act(gate_up[..., :size]) * gate_up[..., size:]`, computed in float32 and rounded once.

    `gate_up` is `[..., 2 * size]`, its last dim without gaps; `activation` is a name in `ACTIVATIONS`. The result is a
    new contiguous tensor `[..., size]` of the same dtype.
    """
    if gate_up.is_cuda:
        from piecegraph.passes.kernels.elementwise.act_mul import act_mul_on_gpu

        return act_mul_on_gpu(gate_up, activation)
    return act_mul_reference(gate_up, activation)


def act_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return what the kernel computes, in plain torch."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def _half(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


ACT_MUL = define_op("act_mul(Tensor gate_up, str activation) -> Tensor", act_mul, _half)
