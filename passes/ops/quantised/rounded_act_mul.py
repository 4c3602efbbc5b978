"""The op `piecegraph::act_mul_rounded`: a gated activation whose result is rounded for a quantised linear."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.act_mul import act_mul
from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows, rounded_like

MAX_ROUNDED_SIZE = 16384
"""The most columns with one scale whose activation and rounding is one kernel: a program has all of them."""


def act_mul_rounded(
    gate_up: torch.Tensor, activation: str, group: int, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `round_rows(act_mul(gate_up, activation), group, stored)`: values `[..., size]` and scales.

    `gate_up` is `[..., 2 * size]`. The activation is rounded to its dtype first, so that the bits are those of the
    separate ops.
    """
    size = gate_up.shape[-1] // 2
    length = size if group == WHOLE_TOKEN else group
    if gate_up.is_cuda and length <= MAX_ROUNDED_SIZE:
        from piecegraph.passes.kernels.quantised.rounded_act_mul import act_mul_rounded_on_gpu

        return act_mul_rounded_on_gpu(gate_up, activation, length, stored)
    return round_rows(act_mul(gate_up, activation), group, stored)


ACT_MUL_ROUNDED = define_op(
    "act_mul_rounded(Tensor gate_up, str activation, int group, ScalarType stored) -> (Tensor, Tensor)",
    act_mul_rounded,
    lambda gate_up, activation, group, stored: rounded_like(gate_up, gate_up.shape[-1] // 2, group, stored),
)
