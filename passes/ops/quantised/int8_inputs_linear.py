"""The op `piecegraph::int8_inputs_linear`: a linear whose weights and inputs are int8 (W8A8)."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op

_HALF_RANGE = 127.5
"""The largest magnitude of a token over this is its scale, as compressed-tensors has it: half of 127 - (-128)."""


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
    rows = x.reshape(-1, x.shape[-1])
    most = None if largest is None else largest.reshape(-1, 1)
    if x.is_cuda:
        from piecegraph.passes.kernels.quantised.rounded_linear import rounded_linear_on_gpu
        from piecegraph.passes.kernels.quantised.rounded_rows import rounded_rows_on_gpu

        if most is None:
            values, step = rounded_rows_on_gpu(rows, rows.shape[1], torch.int8)
        else:
            values, step = rounded_to_int8(rows, most)
        found = rounded_linear_on_gpu(values, step, weight, scale.unsqueeze(1), bias, (1, 0), x.dtype)
        assert found is not None, "scales by channel fit every tile"
        return found.view(*x.shape[:-1], weight.shape[0])
    values, step = rounded_to_int8(rows, most)
    sums = torch._int_mm(values, weight.t())
    out = (sums.float() * step * scale.float()).to(x.dtype)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def rounded_to_int8(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values `[num_tokens, size]` and the scale of each token `[num_tokens, 1]` float32.

    `largest`: the magnitude that becomes 127.5, `[num_tokens, 1]`; None: the largest of each token.
    """
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True) if largest is None else largest.float()
    step = (most / _HALF_RANGE).clamp(min=1e-12)
    return (wide / step).round().clamp(-128, 127).to(torch.int8), step


INT8_INPUTS_LINEAR = define_op(
    "int8_inputs_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? largest=None) -> Tensor",
    int8_inputs_linear,
    lambda x, weight, scale, bias, largest=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
