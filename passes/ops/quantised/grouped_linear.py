"""The op `piecegraph::grouped_linear`: a linear whose weights are integers of 4 or 8 bits with a scale for each group.

A group is a run of weights of one output channel, such as 32 in GGUF's blocks and 128 in GPTQ's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.quantised.words import from_words
from piecegraph.passes.ops.library import define_op

_ROWS_AT_ONCE = 2048
"""The rows of weights that are floats at one time, so that a large matrix has no float copy."""


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x @ w.T + bias` in the dtype of `x`, `[..., num_columns]`, for `w = q * scale + offset`.

    `x` is a float `[..., size]`. `weight` is int8 `[num_columns, size]`; or uint8 `[num_columns, size / 2]` with two
    values from 0 to 15 in each byte, the first in the low bits; or int32 `[num_columns, size / 8]` with such values in
    the order of `words.py`. `scale` is float `[num_columns, num_groups]` without offsets, or `[num_columns, num_groups,
    2]` with the offset after the scale; `num_groups` divides `size`. `w` is rounded to the dtype of `x`. A new
    tensor; nothing is mutated.
    """
    num_columns = weight.shape[0]
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        found = _on_gpu(rows, weight, scale, bias)
        if found is not None:
            return found.view(*x.shape[:-1], num_columns)
    out = rows.new_empty((rows.shape[0], num_columns))
    for first in range(0, num_columns, _ROWS_AT_ONCE):
        part = slice(first, min(first + _ROWS_AT_ONCE, num_columns))
        out[:, part] = F.linear(rows, dequantised(weight[part], scale[part], x.dtype))
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_columns)


def _on_gpu(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if weight.dtype is torch.int32 and rows.dtype is scale.dtype:
        from piecegraph.passes.kernels.quantised.word_linear import word_linear_on_gpu

        return word_linear_on_gpu(rows, weight, scale, bias)
    if weight.dtype is torch.int32:
        return None
    from piecegraph.passes.kernels.quantised.weights_only import weights_only_linear_on_gpu

    return weights_only_linear_on_gpu(rows, weight, scale, bias, (1, rows.shape[1] // scale.shape[1]), rows.dtype)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights `[..., size]` that the op multiplies by, as `dtype`. Shapes may have more dims in front."""
    unpack = {torch.uint8: nibbles, torch.int32: from_words}.get(weight.dtype)
    values = weight if unpack is None else unpack(weight)
    has_offsets = scale.ndim > values.ndim
    step = scale[..., 0] if has_offsets else scale
    grouped = values.unflatten(-1, (step.shape[-1], -1)).float() * step.float().unsqueeze(-1)
    if has_offsets:
        grouped += scale[..., 1].float().unsqueeze(-1)
    floats: torch.Tensor = grouped.flatten(-2).to(dtype)
    return floats


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the two values of each byte, the low bits first: `[..., 2 * n]` uint8 for `[..., n]`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


GROUPED_LINEAR = define_op(
    "grouped_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    grouped_linear,
    lambda x, weight, scale, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
