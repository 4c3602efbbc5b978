"""The op `piecegraph::rounded_linear`: a linear over rows that are rounded already, to int8 or to e4m3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised import e4m3
from piecegraph.passes.ops.quantised.e4m3 import e4m3_to_bfloat16, times_dequantised


def rounded_linear(
    values: torch.Tensor,
    step: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block: Sequence[int],
    input_group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `(values * step) @ (weight * scale).T + bias` in `dtype`, `[..., num_columns]`.

    `values`, `[..., size]`, and `step`, float32 `[..., num_groups]`, are what `round_rows` returns for `input_group`.
    `weight` is of the dtype of `values`, `[num_columns, size]` and without NaN. `scale`: floats `[num_columns]` for
    int8, and for e4m3 `[ceil(num_columns / block[0]), ceil(size / block[1])]`. Products and sums of int8 are exact.
    Those of e4m3 are exact products with sums in float32, but that a CPU rounds weights times scales, and values times
    steps, to `dtype` where groups have scales of their own. A new tensor; nothing is mutated.
    """
    num_columns, size = weight.shape
    rows, steps = values.reshape(-1, size), step.reshape(-1, step.shape[-1])
    if values.is_cuda:
        from piecegraph.passes.kernels.quantised.rounded_linear import rounded_linear_on_gpu

        scales = scale.unsqueeze(1) if scale.ndim == 1 else scale
        found = rounded_linear_on_gpu(rows, steps, weight, scales, bias, block, dtype)
        if found is not None:
            return found.view(*values.shape[:-1], num_columns)
    if values.dtype is torch.int8:
        out = (torch._int_mm(rows, weight.t()).float() * steps * scale.float()).to(dtype)
    elif steps.shape[1] == scale.shape[1] == block[0] == 1:
        out = _by_channel(rows, steps, weight, scale, dtype)
    else:
        out = _by_block(rows, steps, weight, scale, block, input_group, dtype)
    if bias is not None:
        out += bias
    return out.view(*values.shape[:-1], num_columns)


def _by_channel(
    rows: torch.Tensor, steps: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply e4m3, which is exact in bfloat16, and scale the sums, which are rounded to bfloat16 if `dtype` is."""
    exact = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    floats = e4m3_to_bfloat16(rows).to(exact)
    out = rows.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)
    for first in range(0, weight.shape[0], e4m3.ROWS_AT_ONCE):
        part = slice(first, min(first + e4m3.ROWS_AT_ONCE, weight.shape[0]))
        sums = F.linear(floats, e4m3_to_bfloat16(weight[part]).to(exact))
        out[:, part] = sums.float() * steps * scale[part].float().t()
    return out


def _by_block(
    rows: torch.Tensor,
    steps: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: Sequence[int],
    input_group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply e4m3 times its scales, rounded to `dtype`."""
    every = steps if steps.shape[1] == 1 else steps.repeat_interleave(input_group, 1)[:, : rows.shape[1]]
    return times_dequantised((e4m3_to_bfloat16(rows).float() * every).to(dtype), weight, scale, block)


ROUNDED_LINEAR = define_op(
    "rounded_linear(Tensor values, Tensor step, Tensor weight, Tensor scale, Tensor? bias, int[] block, "
    "int input_group, ScalarType dtype) -> Tensor",
    rounded_linear,
    lambda values, step, weight, scale, bias, block, input_group, dtype: values.new_empty(
        (*values.shape[:-1], weight.shape[0]), dtype=dtype
    ),
)
