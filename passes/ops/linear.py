"""The op `piecegraph::linear`: a linear, or one whose two halves a gated activation joins, for any number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.act_mul import act_mul
from piecegraph.passes.ops.library import define_op


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, *, is_normed: bool = False
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; with an activation (a name in `act_mul.ACTIVATIONS`, or `""`), `act_mul` of that.

    `x` is `[..., size]`, `weight` `[num_columns, size]` contiguous, `bias` `[num_columns]`. Sums accumulate in float32;
    the activation is applied before anything is rounded where our kernel runs, and after that where the library's does.
    `is_normed` says that a norm just made `x`, which decides between kernels for one row. The result is a new
    contiguous tensor `[..., num_columns]`, with half as many columns if there is an activation.
    """
    if x.is_cuda:
        from piecegraph.passes.kernels.linear.linear import linear_of_rows_on_gpu

        num_rows = x.numel() // x.shape[-1]
        rows = linear_of_rows_on_gpu(x.reshape(num_rows, x.shape[-1]), weight, bias, activation, is_normed=is_normed)
        if rows is not None:
            return rows.view(*x.shape[:-1], rows.shape[-1])
    out = F.linear(x, weight, bias)
    return act_mul(out, activation) if activation else out


def _result(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation else 1)))


LINEAR = define_op("linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor", linear, _result)
