"""The op `piecegraph::int8_linear`: a linear whose weights are int8, with one scale for each output channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.cpu.int8_rows import int8_rows
from piecegraph.passes.ops.library import define_op

MAX_PACKED_ROWS = 16
"""The most rows that are multiplied by int8 weights as they lie; more rows pay for a copy of the weights in bfloat16.

Measured on two cores of an AMD EPYC with AVX512-BF16: docs/quantization.md has the figures."""

_CHUNK = 16
"""Torch's kernel reads rows of weights by 16 values and checks no size: other sizes gave infinities and crashes."""


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias` in the dtype of `x`, a new contiguous tensor.

    `x` is float32 or bfloat16, `[..., size]`; `weight` int8, `[num_columns, size]`, contiguous; `scale` and
    `bias` have the dtype of `x` and are `[num_columns]`. Nothing is mutated.

    On a CPU that has our kernel (`passes/kernels/cpu/`), rows of float32 and a few of bfloat16 are rounded to 16-bit
    fixed point, with one scale for a row, and their sums are exact; a row with an infinity gives NaN. Otherwise `x` is
    rounded to bfloat16, in which int8 is exact; sums accumulate in float32 and are rounded to bfloat16.
    """
    if x.is_cpu and (by_rows := int8_rows(x, weight, scale, bias)) is not None:
        return by_rows
    num_columns, size = weight.shape
    rows = x.reshape(-1, size).to(torch.bfloat16)
    if x.is_cuda:
        from piecegraph.passes.kernels.quantised.weights_only import weights_only_linear_on_gpu

        by_channel = weights_only_linear_on_gpu(rows, weight, scale.unsqueeze(1), bias, (1, 0), x.dtype)
        assert by_channel is not None, "scales by channel fit every tile"
        return by_channel.view(*x.shape[:-1], num_columns)
    if rows.shape[0] <= MAX_PACKED_ROWS and size % _CHUNK == 0:
        if scale.dtype is torch.bfloat16:
            out = torch._weight_int8pack_mm(rows, weight, scale)
        else:
            ones = torch.ones(num_columns, dtype=torch.bfloat16)
            out = torch._weight_int8pack_mm(rows, weight, ones).to(x.dtype) * scale
    else:
        out = F.linear(rows, weight.to(torch.bfloat16)).to(x.dtype) * scale
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_columns)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights `[num_columns, size]` that the op multiplies by, as `dtype`: the reference of tests."""
    return (weight.float() * scale.float()[:, None]).to(dtype)


INT8_LINEAR = define_op(
    "int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    int8_linear,
    lambda x, weight, scale, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    is_recordable=True,
)
