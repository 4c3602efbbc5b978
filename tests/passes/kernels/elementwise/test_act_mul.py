"""The gated activation's kernel gives what its reference gives."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.elementwise.act_mul import act_mul_on_gpu
from piecegraph.passes.ops.act_mul import ACTIVATIONS, act_mul_reference
from tests.interpreter import interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
"""The short ones may round apart; in float32, `1 + erf` of a negative gate has few digits left."""


def rows(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=random) * 4).to(device, dtype)


def check(gate_up: torch.Tensor, activation: str) -> None:
    found = act_mul_on_gpu(gate_up, activation)
    tolerance = TOLERANCE[gate_up.dtype]
    assert found.is_contiguous()
    torch.testing.assert_close(found, act_mul_reference(gate_up, activation), rtol=tolerance, atol=tolerance)


def check_layouts(dtype: torch.dtype, device: str = "cpu") -> None:
    """Blocks that fit and that do not, columns of a wider tensor, large values, no rows."""
    for activation in ACTIVATIONS:
        for shape in ((1, 96), (3, 2 * 1500), (1, 5, 2 * 1024), (0, 64)):
            check(rows(*shape, dtype=dtype, device=device), activation)
        check(rows(1, 4, 160, dtype=dtype, device=device)[..., 32:96], activation)
        large = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 2.0, 2.0, 2.0, 2.0]], dtype=dtype, device=device)
        check(large, activation)


def check_interpreted() -> None:
    """The interpreter gets bfloat16 wrong."""
    check_layouts(torch.float32)
    check_layouts(torch.float16)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernel_equals_the_reference_on_the_gpu(dtype: torch.dtype) -> None:
    check_layouts(dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3072, 8960, 14336])
@pytest.mark.parametrize("num_rows", [1, 32, 256, 3000])
def test_sizes_of_real_models(num_rows: int, size: int) -> None:
    for activation in ACTIVATIONS:
        check(rows(num_rows, 2 * size, dtype=torch.bfloat16, device="cuda"), activation)
