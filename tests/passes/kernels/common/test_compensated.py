"""Sums of many float32 products lose what sums of a few do: interpreted, as they are compiled, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted

pytest.importorskip("triton")

SIZE = 8192


def relative_error(device: str) -> float:
    """Of a sum of `SIZE` numbers of one sign, where one after another would lose most."""
    from tests.passes.kernels.common.compensated_kernel import product

    random = torch.Generator().manual_seed(0)
    a, b = torch.rand(16, SIZE, generator=random).to(device), torch.rand(SIZE, 16, generator=random).to(device)
    out = torch.empty(16, 16, device=device)
    product[(1,)](a, b, out, SIZE)
    wanted = a.double() @ b.double()
    return float(((out - wanted) / wanted).square().mean().sqrt())


def check_overflow() -> None:
    """Infinite, as it is without; a NaN stays one."""
    from tests.passes.kernels.common.compensated_kernel import product

    a, b, out = torch.ones(16, 64), torch.ones(64, 16), torch.empty(16, 16)
    a[0, :2] = b[:2] = 3e38
    a[1, 40] = float("nan")
    product[(1,)](a, b, out, 64)
    assert out[0].isposinf().all() and out[1].isnan().all()


def check_interpreted() -> None:
    """Blocks of 16 added up one after another have 3.2e-7."""
    assert relative_error("cpu") < 1e-7


@pytest.mark.parametrize("check", [check_interpreted, check_overflow])
def test_the_interpreted_kernel_equals_the_reference(check: Callable[[], None]) -> None:
    interpreted(check)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    assert relative_error("cuda") < 1e-7


def test_triton_leaves_the_sum_of_each_block_apart() -> None:
    """Each number of the result: 16 products one after another, then what makes up for what was lost."""
    from tests.passes.kernels.common.compensated_kernel import product

    arguments = {"a": torch.empty(0), "b": torch.empty(0), "out": torch.empty(0), "SIZE": SIZE}
    ptx = compile_for_gpu(product, arguments, {"num_warps": 4})
    num_products, num_subtractions = (len(re.findall(rf"\b{name}\S*\.f32\b", ptx)) for name in ("fma", "sub"))
    assert num_products == 16 * (num_subtractions // 3) > 0


def test_other_numbers_are_left_to_tensor_cores() -> None:
    from tests.passes.kernels.common.compensated_kernel import product

    short = torch.empty(0, dtype=torch.bfloat16)
    ptx = compile_for_gpu(product, {"a": short, "b": short, "out": torch.empty(0), "SIZE": SIZE}, {"num_warps": 4})
    assert "mma" in ptx and not re.findall(r"\b(fma|sub)\S*\.f32\b", ptx)
