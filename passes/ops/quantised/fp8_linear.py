"""The op `piecegraph::fp8_linear`: a linear whose weights are float8 (e4m3), and its input too if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.quantised.e4m3 import times_dequantised
from piecegraph.passes.ops.quantised.rounded_linear import rounded_linear
from piecegraph.passes.ops.quantised.rounded_rows import round_rows


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block: Sequence[int],
    input_group: int,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ (weight * scale).T + bias` in the dtype of `x`, `[..., num_columns]`.

    `x` is a float `[..., size]`; `weight` float8_e4m3fn `[num_columns, size]` without NaN; `scale` float
    `[ceil(num_columns / block[0]), ceil(size / block[1])]`, one for each block of weights. `input_group`: 0 leaves `x`
    as it is, and weights times scales are rounded to its dtype; otherwise `x` is rounded to e4m3 with a scale for each
    group of as many values (`WHOLE_TOKEN`: for each token), its largest magnitude over 448, and `rounded_linear`
    multiplies. `largest`: that magnitude of each token, `[..., 1]`; None: its own. A new tensor; nothing is mutated.
    """
    if input_group:
        values, step = round_rows(x, input_group, torch.float8_e4m3fn, largest)
        return rounded_linear(values, step, weight, scale, bias, block, input_group, x.dtype)
    num_columns = weight.shape[0]
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from piecegraph.passes.kernels.quantised.weights_only import weights_only_linear_on_gpu

        found = weights_only_linear_on_gpu(rows, weight, scale, bias, block, rows.dtype)
        if found is not None:
            return found.view(*x.shape[:-1], num_columns)
    out = times_dequantised(rows, weight, scale, block)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_columns)


FP8_LINEAR = define_op(
    "fp8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int[] block, int input_group, "
    "Tensor? largest=None) -> Tensor",
    fp8_linear,
    lambda x, weight, scale, bias, block, input_group, largest=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
