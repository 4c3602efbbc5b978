"""Weights of every scheme that a kernel multiplies by, with the same weights in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.passes.kernels.quantised import split_sums
from piecegraph.passes.ops.quantised import e4m3 as e4m3_values
from piecegraph.passes.ops.quantised import grouped_linear
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Stored weights, `[num_columns, size]` as floats, of one scheme."""

    values: torch.Tensor
    scale: torch.Tensor  # [row blocks, groups], or with offsets [row blocks, groups, 2]
    block: tuple[int, int]
    input_group: int = 0

    def floats(self) -> torch.Tensor:
        """The weights in float64."""
        if self.values.dtype is E4M3:
            return e4m3_values.dequantised(self.values, self.scale, self.block, torch.float64)
        return grouped_linear.dequantised(self.values, self.scale.double(), torch.float64)


def integers(num_columns: int, size: int, *, bits: int, group: int, offset: bool, dtype: torch.dtype) -> Weights:
    """Return random weights of 4 or 8 bits; `group` 0: one scale for a channel."""
    generator = torch.Generator().manual_seed(bits + group)
    shape = (num_columns, size * bits // 8)
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    groups = size // group if group else 1
    scale = torch.rand((num_columns, groups, 2) if offset else (num_columns, groups), generator=generator) * 0.02 + 0.01
    if offset:
        scale[..., 1] *= -8
    return Weights(values=values if bits == 4 else values.view(torch.int8), scale=scale.to(dtype), block=(1, group))


def e4m3(num_columns: int, size: int, *, block: tuple[int, int], input_group: int = 0) -> Weights:
    """Return random weights in e4m3; a block of 0 columns has all."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(num_columns, size, generator=generator).to(E4M3)
    shape = (-(-num_columns // block[0]), -(-size // block[1]) if block[1] else 1)
    scale = torch.rand(shape, generator=generator) * 0.02 + 0.01
    return Weights(values=values, scale=scale, block=block, input_group=input_group)


def weights_only(num_columns: int, size: int, dtype: torch.dtype) -> dict[str, Weights]:
    """Return weights of each scheme whose inputs are floats, by a name."""
    return {
        "int8": integers(num_columns, size, bits=8, group=0, offset=False, dtype=dtype),
        "int8 with offsets": integers(num_columns, size, bits=8, group=0, offset=True, dtype=dtype),
        "int8 in groups": integers(num_columns, size, bits=8, group=32, offset=False, dtype=dtype),
        "int4 by channel": integers(num_columns, size, bits=4, group=0, offset=False, dtype=dtype),
        "int4 in groups of 32": integers(num_columns, size, bits=4, group=32, offset=True, dtype=dtype),
        "int4 in groups of 64": integers(num_columns, size, bits=4, group=64, offset=False, dtype=dtype),
        "e4m3": e4m3(num_columns, size, block=(1, 0)),
        "e4m3 in blocks": e4m3(num_columns, size, block=(32, 64)),
    }


def rounded_inputs(num_columns: int, size: int) -> dict[str, Weights]:
    """Return weights of each scheme whose inputs are rounded, by a name; int8 has `input_group` `WHOLE_TOKEN`."""
    int8 = integers(num_columns, size, bits=8, group=0, offset=False, dtype=torch.float32)
    return {
        "int8": Weights(values=int8.values, scale=int8.scale, block=(1, 0), input_group=WHOLE_TOKEN),
        "e4m3": e4m3(num_columns, size, block=(1, 0), input_group=WHOLE_TOKEN),
        "e4m3 in blocks": e4m3(num_columns, size, block=(64, 64), input_group=64),
    }


def spread(values: torch.Tensor, step: torch.Tensor, group: int) -> torch.Tensor:
    """Return rounded rows `[num_rows, size]` in float32: each value times the scale of its group of `group` columns."""
    return values.float() * step.repeat_interleave(group, 1)[:, : values.shape[1]]


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the root mean square error over that of what was wanted."""
    difference = found.double() - wanted.double()
    return float(difference.square().mean().sqrt() / wanted.double().square().mean().sqrt())


def split_everything(kernels: Any) -> list[torch.Tensor]:
    """Make a module of kernels split sums whose parts are short, too, and return the list that gets all parts."""
    added: list[torch.Tensor] = []
    add_parts = kernels.add_parts_on_gpu

    def add(parts: torch.Tensor, *others: Any, **options: Any) -> None:
        added.append(parts)
        add_parts(parts, *others, **options)

    split_sums.MIN_TILES = 1
    kernels.add_parts_on_gpu = add
    return added
