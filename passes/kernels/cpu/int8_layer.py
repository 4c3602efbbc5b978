"""The kernels in C++ for all that is between two calls of attention, and how they are called.

Where they are not there, `piecegraph::int8_layer_linears` computes by torch, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piecegraph.passes.kernels.common.cpp_kernel import FLOAT, INT, NUMBER, POINTER, CppKernel
from piecegraph.passes.kernels.cpu import int8_rows

_SOURCE = Path(__file__).with_name("int8_linear.cpp")
_NEEDS: Mapping[str, Any] = {"instructions": int8_rows.KERNEL.instructions, "probe": "piecegraph_has_vnni"}

KERNEL = CppKernel(_SOURCE, "piecegraph_int8_layer", [*[POINTER] * 18, *[FLOAT] * 4, *[NUMBER] * 5, INT, INT], **_NEEDS)
"""This computes a whole layer: for few rows, a call for each part would take longer than the part."""

ADD_AND_NORM = CppKernel(
    _SOURCE, "piecegraph_add_and_norm", [*[POINTER] * 5, FLOAT, FLOAT, NUMBER, NUMBER, INT, INT], **_NEEDS
)
GATE_ROWS = CppKernel(_SOURCE, "piecegraph_gate_rows", [POINTER, POINTER, NUMBER, NUMBER, INT, INT], **_NEEDS)
"""These compute the sums, norms and gates between linears that torch multiplies, as it does many rows of bfloat16."""


class Linear(NamedTuple):
    """The weights of a linear, as `int8_linear` takes them."""

    weight: torch.Tensor  # [num_columns, size] int8
    scale: torch.Tensor  # [num_columns]
    bias: torch.Tensor | None  # [num_columns]

    def fits(self, num_columns: int, size: int, dtype: torch.dtype) -> bool:
        """Return whether the kernel reads these weights, as those of a linear of `size` to `num_columns` numbers."""
        numbers = (self.scale,) if self.bias is None else (self.scale, self.bias)
        return (
            self.weight.shape == (num_columns, size)
            and 0 < size <= int8_rows.MAX_SIZE
            and self.weight.dtype is torch.int8
            and self.weight.is_contiguous()
            and all(each.dtype is dtype and each.shape == (num_columns,) and each.is_contiguous() for each in numbers)
        )

    def addresses(self) -> tuple[int, int, int | None]:
        """Return the addresses of the weight, the scale and the bias."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return self.weight.data_ptr(), self.scale.data_ptr(), bias


class Norm(NamedTuple):
    """A norm over the last dim, as `rms_norm` takes it."""

    weight: torch.Tensor | None  # [size]
    eps: float
    offset: float

    def fits(self, size: int, dtype: torch.dtype) -> bool:
        """Return whether the kernel reads the weight, as that of a norm over `size` numbers."""
        weight = self.weight
        return weight is None or (weight.dtype is dtype and weight.shape == (size,) and weight.is_contiguous())


class Layer(NamedTuple):
    """The linears between two calls of attention, and the norms before two of them, in their order."""

    out: Linear
    norm: Norm
    gate_up: Linear
    down: Linear
    next_norm: Norm
    next: Linear


def int8_layer(x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `int8_layer_linears` does, or None for what the kernel does not compute, or nobody does.

    It computes float32, and bfloat16 up to `int8_rows.MAX_BFLOAT16_ROWS` rows, once it is there.
    """
    hidden, size = layer.out.weight.shape
    inner, num_columns = layer.down.weight.shape[1], layer.next.weight.shape[0]
    dtype = x.dtype
    num_rows = residual.numel() // hidden if hidden else 0
    if KERNEL.call is None or num_rows == 0 or dtype not in (torch.float32, torch.bfloat16):
        return None
    if dtype is torch.bfloat16 and num_rows > int8_rows.MAX_BFLOAT16_ROWS:
        return None
    if residual.dtype is not dtype or residual.shape != (*x.shape[:-1], hidden) or x.shape[-1] != size:
        return None
    fit = (
        layer.out.fits(hidden, size, dtype)
        and layer.gate_up.fits(2 * inner, hidden, dtype)
        and layer.down.fits(hidden, inner, dtype)
        and layer.next.fits(num_columns, hidden, dtype)
        and layer.norm.fits(hidden, dtype)
        and layer.next_norm.fits(hidden, dtype)
    )
    if not fit or not num_columns:
        return None
    rows, before = x.contiguous(), residual.contiguous()
    after, total = before.new_empty((*x.shape[:-1], num_columns)), torch.empty_like(before)
    norms = [None if each.weight is None else each.weight.data_ptr() for each in (layer.norm, layer.next_norm)]
    has_no_memory = KERNEL.run(
        rows.data_ptr(),
        before.data_ptr(),
        after.data_ptr(),
        total.data_ptr(),
        *layer.out.addresses(),
        norms[0],
        *layer.gate_up.addresses(),
        *layer.down.addresses(),
        norms[1],
        *layer.next.addresses(),
        *layer.norm[1:],
        *layer.next_norm[1:],
        num_rows,
        size,
        hidden,
        inner,
        num_columns,
        dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if has_no_memory:
        raise MemoryError(f"no memory for {num_rows} rows of {3 * (hidden + inner)} numbers")
    return after, total


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `add_rms_norm` does, or None for what the kernel does not compute, or nobody does."""
    size, dtype = x.shape[-1], x.dtype
    if ADD_AND_NORM.call is None or dtype not in (torch.float32, torch.bfloat16) or not x.numel():
        return None
    if residual.dtype is not dtype or residual.shape != x.shape or not norm.fits(size, dtype):
        return None
    rows, before = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(rows), torch.empty_like(rows)
    ADD_AND_NORM.run(
        rows.data_ptr(),
        before.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        None if norm.weight is None else norm.weight.data_ptr(),
        norm.eps,
        norm.offset,
        rows.numel() // size,
        size,
        dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return normed, total


def gate_rows(gate_up: torch.Tensor) -> torch.Tensor | None:
    """Return what `act_mul` does with silu, or None for what the kernel does not compute, or nobody does."""
    size, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    if GATE_ROWS.call is None or dtype not in (torch.float32, torch.bfloat16) or not gate_up.numel():
        return None
    if gate_up.shape[-1] % 2:
        return None
    rows = gate_up.contiguous()
    out = rows.new_empty((*rows.shape[:-1], size))
    num_rows = rows.numel() // (2 * size)
    GATE_ROWS.run(rows.data_ptr(), out.data_ptr(), num_rows, size, dtype is torch.bfloat16, torch.get_num_threads())
    return out
