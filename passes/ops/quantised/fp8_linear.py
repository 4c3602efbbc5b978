"""The op `piecegraph::fp8_linear`: a linear whose weights are float8 (e4m3), and its input too if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.library import define_op

MAX_E4M3 = 448.0
"""The largest finite value of e4m3."""

WHOLE_TOKEN = -1
"""The group size of an input with one scale for each token."""

_ROWS_AT_ONCE = 2048


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
    as it is; otherwise it is rounded to e4m3 with a scale for each group of as many values (`WHOLE_TOKEN`: for each
    token), its largest magnitude over 448. `largest`: that magnitude of each token, `[..., 1]`; None: its own. Weights
    times scales are rounded to the dtype of `x`. A new tensor; nothing is mutated.
    """
    num_columns = weight.shape[0]
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda and largest is None:
        found = _on_gpu(rows, weight, scale, bias, block, input_group)
        if found is not None:
            return found.view(*x.shape[:-1], num_columns)
    if input_group:
        rows = rounded_to_e4m3(rows, input_group, None if largest is None else largest.reshape(-1, 1, 1))
    out = rows.new_empty((rows.shape[0], num_columns))
    at_once = max(_ROWS_AT_ONCE // block[0], 1) * block[0]
    for first in range(0, num_columns, at_once):
        part = slice(first, min(first + at_once, num_columns))
        blocks = slice(first // block[0], -(-part.stop // block[0]))
        out[:, part] = F.linear(rows, dequantised(weight[part], scale[blocks], block, x.dtype))
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_columns)


def _on_gpu(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block: Sequence[int],
    input_group: int,
) -> torch.Tensor | None:
    """Return what our kernels compute; None if the groups fit none of their tiles."""
    if input_group == 0:
        from piecegraph.passes.kernels.quantised.weights_only import weights_only_linear_on_gpu

        return weights_only_linear_on_gpu(rows, weight, scale, bias, block, rows.dtype)
    from piecegraph.passes.kernels.quantised.rounded_linear import rounded_linear_on_gpu
    from piecegraph.passes.kernels.quantised.rounded_rows import rounded_rows_on_gpu

    group = rows.shape[1] if input_group == WHOLE_TOKEN else input_group
    values, step = rounded_rows_on_gpu(rows, group, torch.float8_e4m3fn)
    return rounded_linear_on_gpu(values, step, weight, scale, bias, block, rows.dtype)


def rounded_to_e4m3(x: torch.Tensor, group: int, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x`, `[num_tokens, size]`, rounded to e4m3 times a scale for each group, in its own dtype.

    `largest`: the magnitude that becomes 448, `[num_tokens, 1, 1]`; None: the largest of each group.
    """
    size = x.shape[-1]
    length = size if group == WHOLE_TOKEN else group
    padded: torch.Tensor = F.pad(x, (0, -size % length)).unflatten(-1, (-1, length)).float()
    most = padded.abs().amax(-1, keepdim=True) if largest is None else largest.float()
    step = (most / MAX_E4M3).clamp(min=1e-12)
    near = (padded / step).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).float() * step
    return near.flatten(-2)[..., :size].to(x.dtype)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the weights `[num_columns, size]` that the op multiplies by, as `dtype`."""
    num_columns, size = weight.shape
    factor = scale.float()
    if block[0] > 1:
        factor = factor.repeat_interleave(block[0], 0)[:num_columns]
    if scale.shape[1] > 1:
        factor = factor.repeat_interleave(block[1], 1)[:, :size]
    return (e4m3_to_bfloat16(weight).float() * factor).to(dtype)


def e4m3_to_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """Return the same values in bfloat16; no value is NaN.

    The bits are moved to their places and the exponent's bias is corrected by a product, which is exact for subnormal
    values too. Torch converts e4m3 on a CPU one value at a time, ten times as slowly.
    """
    bits = weight.view(torch.int8).to(torch.int16)  # the sign is extended to the high bits
    moved = ((bits << 4) & 0x07F0) | (bits & -0x8000)
    return moved.view(torch.bfloat16) * 2.0**120


FP8_LINEAR = define_op(
    "fp8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int[] block, int input_group, "
    "Tensor? largest=None) -> Tensor",
    fp8_linear,
    lambda x, weight, scale, bias, block, input_group, largest=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
