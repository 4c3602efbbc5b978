"""Linears of a few columns: the kernel's results are those of torch; compiled for sm_90."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.linear import LINEAR
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted

CASES = [(1, 1, 2048), (3, 1, 100), (2, 4, 3000), (0, 1, 64)]
"""num_rows, num_columns, size: also of several blocks, and of no rows."""


def check(device: str) -> None:
    from piecegraph.passes.kernels.linear.linear import linear_of_rows_on_gpu

    for dtype in (torch.float16, torch.float32):
        for num_rows, num_columns, size in CASES:
            random = torch.Generator().manual_seed(size)
            x = torch.randn(num_rows, size, generator=random).to(device, dtype)
            weight = torch.randn(num_columns, size, generator=random).div(size**0.5).to(device, dtype)
            for bias in (None, torch.randn(num_columns, generator=random).to(device, dtype)):
                found = linear_of_rows_on_gpu(x, weight, bias, "")
                assert found is not None and found.shape == (num_rows, num_columns) and found.dtype == dtype
                wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
                bound = 2e-3 if dtype == torch.float16 else 1e-5
                torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


def check_interpreted() -> None:
    check("cpu")


def test_the_interpreted_kernel_equals_torch() -> None:
    interpreted(check_interpreted)


def test_the_kernel_compiles_for_hopper() -> None:
    from piecegraph.passes.kernels.linear.narrow_linear import narrow_kernel

    x = torch.zeros(1, dtype=torch.bfloat16)
    compile_for_gpu(
        narrow_kernel,
        {"x": x, "weight": x, "bias": None, "out": x, "size": 2048, "NUM_COLUMNS": 1, "BLOCK": 2048, "OVERLAP": True},
        {"num_warps": 4, "launch_pdl": True},
    )


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda")
    x, weight = torch.randn(8192, 2048, device="cuda").bfloat16(), torch.randn(1, 2048, device="cuda").bfloat16() / 45
    torch.testing.assert_close(
        LINEAR(x, weight, None, "").float(), x.float() @ weight.float().t(), rtol=8e-3, atol=1e-3
    )
