"""The op `piecegraph::int4_tiles_linear`: 4-bit weights in the order of torch's CPU kernel.

That kernel, `_weight_int4pack_mm_for_cpu`, reads tiles of as many output channels as two registers of bytes have
values, so the order of the weights depends on the machine's instructions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from piecegraph.passes.ops.library import define_op

MAX_PACKED_ROWS = 8
"""The most rows that are multiplied by 4-bit weights as they lie; more rows pay for a copy of them in bfloat16."""

TILE_ROWS = {"AVX512": 64, "AVX2": 32}
"""The output channels in a tile, by torch's name of the instructions. Other machines have no such order."""

GROUP_SIZES = (32, 64, 128, 256)
"""The group sizes that torch's kernel takes."""

_ROWS_AT_ONCE = 2048


def tile_rows() -> int | None:
    """Return the output channels in a tile on this machine, or None if its kernel has no tiles."""
    return TILE_ROWS.get(torch.backends.cpu.get_cpu_capability())


def to_tiles(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return values from 0 to 15, `[num_columns, size]`, in tiles: uint8 `[num_columns, size / 2]`.

    `rows` divides `num_columns`. A byte has a value of the tile's first half of channels in its low bits and one of the
    second half in its high bits; a tile has the bytes of one column of the input after another.
    """
    halves: torch.Tensor = values.unflatten(0, (-1, 2, rows // 2)).transpose(2, 3)
    low, high = halves.unbind(1)
    return (low | (high << 4)).to(torch.uint8).contiguous().view(values.shape[0], -1)


def from_tiles(packed: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the values of whole tiles, the inverse of `to_tiles`, as uint8 `[num_columns, size]`."""
    tiles = packed.view(-1, packed.shape[1] * 2, rows // 2)  # [tiles, size, rows / 2]
    return torch.stack((tiles & 15, tiles >> 4), 1).transpose(2, 3).reshape(packed.shape[0], -1)


def int4_tiles_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x @ w.T + bias` in the dtype of `x`, for `w = (q - 8) * scale[..., 0] + scale[..., 1]`.

    `x` is bfloat16 or float32, `[..., size]`, and the result `[..., num_columns]`; `weight` uint8 `[num_columns, size /
    2]` as of `to_tiles`; `scale` bfloat16 `[num_groups, num_columns, 2]`, contiguous; the group size is one of
    `GROUP_SIZES`. `x` is rounded to bfloat16; sums accumulate in float32 and are rounded to bfloat16, before `bias`,
    which has the dtype of `x`, is added. A new tensor; nothing is mutated.
    """
    num_columns, size = weight.shape[0], x.shape[-1]
    rows = x.reshape(-1, size).to(torch.bfloat16)
    if rows.shape[0] <= MAX_PACKED_ROWS:
        out = torch._weight_int4pack_mm_for_cpu(rows.contiguous(), weight, size // scale.shape[0], scale)
    else:
        out = rows.new_empty((rows.shape[0], num_columns))
        for first in range(0, num_columns, _ROWS_AT_ONCE):
            part = slice(first, min(first + _ROWS_AT_ONCE, num_columns))
            out[:, part] = F.linear(rows, dequantised(weight[part], scale[:, part], rows.dtype))
    out = out.to(x.dtype)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], num_columns)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of whole tiles, `[num_columns, size]`, as `dtype`."""
    rows = tile_rows()
    assert rows is not None, "this machine's kernel has no tiles"
    values: torch.Tensor = from_tiles(weight, rows).unflatten(1, (scale.shape[0], -1)).float() - 8
    step, middle = scale.transpose(0, 1).float().unbind(-1)  # [num_columns, num_groups]
    return (values * step.unsqueeze(-1) + middle.unsqueeze(-1)).flatten(1).to(dtype)


INT4_TILES_LINEAR = define_op(
    "int4_tiles_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    int4_tiles_linear,
    lambda x, weight, scale, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
