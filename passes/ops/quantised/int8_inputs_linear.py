"""The op `piecegraph::int8_inputs_linear`: a linear whose weights and inputs are int8 (W8A8)."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised.rounded_linear import rounded_linear
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, round_rows

BY_CHANNEL = (1, 0)
"""The block of weights that have a scale for each output channel."""


def int8_inputs_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x8 @ (weight * scale[:, None]).T + bias` in the dtype of `x`, `[..., num_columns]`.

    `x` is a float `[..., size]`, and `x8` what it becomes when each token is rounded to int8 times a scale of its own;
    `weight` is int8 `[num_columns, size]`; `scale` and `bias` are floats `[num_columns]`. `largest`: the magnitude that
    gives each token its scale, `[..., 1]`; None: its own largest. Sums are exact integers. A new tensor; nothing is
    mutated.
    """
    values, step = round_rows(x, WHOLE_TOKEN, torch.int8, largest)
    return rounded_linear(values, step, weight, scale, bias, BY_CHANNEL, WHOLE_TOKEN, x.dtype)


INT8_INPUTS_LINEAR = define_op(
    "int8_inputs_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? largest=None) -> Tensor",
    int8_inputs_linear,
    lambda x, weight, scale, bias, largest=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
