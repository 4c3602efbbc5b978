"""`piecegraph::int8_layer_linears`: the same by one kernel and step by step, and as an op."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.cpu import int8_layer, int8_rows
from piecegraph.passes.ops.cpu.int8_layer_linears import INT8_LAYER_LINEARS
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.passes.int8_layers import flat, inputs, layer, reference

KERNELS = (int8_rows.KERNEL, int8_layer.KERNEL, int8_layer.ADD_AND_NORM, int8_layer.GATE_ROWS)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("has_kernels", [False, pytest.param(True, marks=needs_cpp_compiler)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (200,), (0,)])
def test_the_op_is_near_float64(
    has_kernels: bool, dtype: torch.dtype, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rows of bfloat16 are step by step either way, with sums, norms and gates by kernels or by torch."""
    for kernel in KERNELS:
        if has_kernels:
            use_kernel(kernel, monkeypatch)
        else:
            monkeypatch.setattr(kernel, "call", None)
    x, residual = inputs(*rows, dtype=dtype)
    of = layer(dtype, has_bias=True, offset=0.5)
    before = x.clone(), residual.clone()
    found = INT8_LAYER_LINEARS(x, residual, *flat(of))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    for own, wanted in zip(found, reference(x, residual, of), strict=True):
        assert own.dtype is dtype and own.is_contiguous() and own.shape == wanted.shape
        assert (own.double() - wanted).abs().sum() <= 4e-2 * wanted.abs().sum()


def test_the_op_says_what_it_does() -> None:
    x, residual = inputs(3, dtype=torch.float32)
    torch.library.opcheck(INT8_LAYER_LINEARS, (x, residual, *flat(layer(torch.float32))))
