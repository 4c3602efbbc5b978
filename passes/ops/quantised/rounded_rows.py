"""The rounding of inputs of quantised linears: to int8 or to e4m3, with a scale for each token or group of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MAX_E4M3 = 448.0
"""The largest finite value of e4m3: the largest magnitude of a group over this is its scale."""

HALF_RANGE = 127.5
"""The largest magnitude of a token over this is its scale in int8, as compressed-tensors has it: half of
127 - (-128)."""

WHOLE_TOKEN = -1
"""The group size of an input with one scale for each token."""


def round_rows(
    x: torch.Tensor, group: int, stored: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x`, a float `[..., size]`, as values of its shape in `stored`, and scales `[..., num_groups]` float32.

    `stored` is int8 or float8_e4m3fn. A scale stands for `group` columns, of which the last ones may be fewer
    (`WHOLE_TOKEN`: for all). `largest`: the magnitude that becomes the largest value, `[..., 1]`, for a scale for each
    token; None: that of each group. A group with a number that is not finite has the scale NaN. New contiguous tensors.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    length = size if group == WHOLE_TOKEN else group
    if x.is_cuda and largest is None:
        from piecegraph.passes.kernels.quantised.rounded_rows import rounded_rows_on_gpu

        values, step = rounded_rows_on_gpu(rows, length, stored)
    else:
        values, step = rounded_reference(rows, length, stored, None if largest is None else largest.reshape(-1, 1))
    return values.view(x.shape), step.view(*x.shape[:-1], step.shape[1])


def rounded_reference(
    x: torch.Tensor, group: int, stored: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel computes, in plain torch, for `x` of `[num_tokens, size]` and `group` columns a scale.

    Torch multiplies by the reciprocal of a number on a GPU. A scale that is off by one bit so makes numbers midway
    between two values round elsewhere, so divisors are tensors.
    """
    size = x.shape[1]
    wide: torch.Tensor = F.pad(x, (0, -size % group)).float().unflatten(1, (-1, group))
    most = wide.abs().amax(-1, keepdim=True) if largest is None else largest.float().unsqueeze(1)
    step = (most / torch.full_like(most, HALF_RANGE if stored is torch.int8 else MAX_E4M3)).clamp(min=1e-12)
    step = torch.where(step.isfinite(), step, torch.nan)
    near = wide / step
    near = near.round().clamp(-128, 127) if stored is torch.int8 else near.clamp(-MAX_E4M3, MAX_E4M3)
    values = near.flatten(1)[:, :size].to(stored)
    return values.contiguous(), step.squeeze(-1).expand(x.shape[0], wide.shape[1]).contiguous()


def num_groups(size: int, group: int) -> int:
    """Return the number of scales of a row."""
    return 1 if group == WHOLE_TOKEN else -(-size // group)


def rounded_like(x: torch.Tensor, size: int, group: int, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors without values as `round_rows` returns them, for rows of `size` and as many as `x` has."""
    values = x.new_empty((*x.shape[:-1], size), dtype=stored)
    return values, x.new_empty((*x.shape[:-1], num_groups(size, group)), dtype=torch.float32)
