"""`piecegraph::add_norm_linear`: what it computes, that it rounds no worse than its parts, and its shapes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.linear.linear_parts import parts_config
from piecegraph.passes.ops.norm_linear import ADD_NORM_LINEAR, LINEAR_ADD_NORM_LINEAR
from tests.gpus import H200
from tests.passes.relative_error import Tensors, assert_no_less_exact, quick_and_all

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6
ROWS = (1, 2, 3, 5, 16, 33, 64, 65, 130)
WEIGHTS = [
    (32, 64), (32, 128), (32, 192), (32, 320), (64, 64), (64, 128), (96, 128), (128, 64), (48, 64), (64, 1024),
    (40, 64), (64, 100),
]  # fmt: skip
"""Its rows, and their size; those of the last line are the library's whatever the rows of x."""

SHAPES = [(rows, *weight) for rows in ROWS for weight in WEIGHTS]
LONG = [(1, 64, 2048), (1, 32, 4096), (1, 32, 4160)]


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    rows, columns, size = shape
    x, residual = torch.randn(2, rows, size, generator=random)
    weight = torch.randn(columns, size, generator=random) / size**0.5
    return x, residual, torch.rand(size, generator=random) + 0.5, weight, torch.randn(columns, generator=random)


def fused(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Tensors:
    return (
        *ADD_NORM_LINEAR(x, residual, norm, EPS, 0.0, weight, None, ""),
        ADD_NORM_LINEAR(x, residual, norm, EPS, 1.0, weight, bias, "silu")[0],
        ADD_NORM_LINEAR(x, residual, None, EPS, 0.0, weight, bias, "")[0],
    )


def unfused(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Tensors:
    """Return norm and linear as transformers spells them.

    Except for Gemma's, its norms round before they multiply by their weight.
    """
    total = x + residual
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    gate, up = F.linear((wide * (1.0 + norm.to(wide.dtype))).to(x.dtype), weight, bias).chunk(2, -1)
    plain = F.linear(norm * wide.to(x.dtype), weight)
    return plain, total, F.silu(gate) * up, F.linear(wide.to(x.dtype), weight, bias)


def check_against_torch(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: str) -> None:
    assert_no_less_exact(
        fused, unfused, unfused, make_inputs, shapes, dtype, device, min_numbers=4096, num_terms=lambda shape: shape[-1]
    )


@pytest.mark.parametrize("shapes", quick_and_all(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_no_less_exact_than_torch(dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> None:
    check_against_torch(shapes, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_are_no_less_exact_than_torch(dtype: torch.dtype) -> None:
    check_against_torch([*SHAPES, *LONG, (1, 6144, 4096)], dtype, "cuda")


def make_long_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    """Return inputs with a preceding linear for a shape of rows, its size, the norm's size, columns."""
    rows, in_size, size, columns = shape
    x, residual = torch.randn(rows, in_size, generator=random), torch.randn(rows, size, generator=random)
    before = torch.randn(size, in_size, generator=random) / in_size**0.5
    weight = torch.randn(columns, size, generator=random) / size**0.5
    norm = torch.rand(size, generator=random) + 0.5
    return x, before, torch.randn(size, generator=random), residual, norm, weight


def with_linear_ahead(*operands: torch.Tensor) -> Tensors:
    x, before, bias, residual, norm, weight = operands
    return (
        *LINEAR_ADD_NORM_LINEAR(x, before, None, residual, norm, EPS, 0.0, weight, None, ""),
        *LINEAR_ADD_NORM_LINEAR(x, before, bias, residual, norm, EPS, 0.0, weight, None, "silu"),
    )


def with_linear_ahead_unfused(*operands: torch.Tensor) -> Tensors:
    x, before, bias, residual, norm, weight = operands
    plain, biased = F.linear(x, before), F.linear(x, before, bias)
    none = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    gated, biased_total = (unfused(biased, residual, norm, weight, none)[index] for index in (0, 1))
    gate, up = gated.chunk(2, -1)
    return (*unfused(plain, residual, norm, weight, none)[:2], F.silu(gate) * up, biased_total)


LONG_SHAPES = [
    (rows, *sizes)
    for rows in (1, 2, 3, 16, 17, 32, 63, 64, 65, 100, 128, 200, 256, 300)
    for sizes in (
        (512, 64, 64), (512, 128, 64), (1024, 128, 32), (1536, 64, 96), (128, 64, 64), (64, 96, 32), (2048, 192, 64),
        (640, 64, 32),
    )
]  # fmt: skip


@pytest.mark.parametrize("shapes", quick_and_all(LONG_SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_linear_ahead_it_is_no_less_exact_than_torch(
    dtype: torch.dtype, shapes: list[tuple[int, int, int, int]]
) -> None:
    assert_no_less_exact(
        with_linear_ahead, with_linear_ahead_unfused, with_linear_ahead_unfused, make_long_inputs, shapes, dtype,
        "cpu", min_numbers=4096, num_terms=lambda shape: shape[1] + shape[2],
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_with_a_linear_ahead_are_no_less_exact_than_torch(dtype: torch.dtype) -> None:
    real = [(rows, size, 1024, 4096) for rows in (2, 7, 16, 17, 32, 128, 256) for size in (2048, 3072)]
    real += [(rows, *sizes) for rows in (1, 2, 8, 16, 32) for sizes in ((4096, 4096, 1024), (14336, 2560, 1024))]
    assert_no_less_exact(
        with_linear_ahead, with_linear_ahead_unfused, with_linear_ahead_unfused, make_long_inputs,
        [*LONG_SHAPES, *real], dtype, "cuda", min_numbers=4096, num_terms=lambda shape: shape[1] + shape[2],
    )  # fmt: skip


def test_which_shapes_are_split() -> None:
    found = [parts_config(rows, size, in_size, itemsize=2, gpu=H200) for rows, in_size, size, _ in LONG_SHAPES]
    assert sum(each is None for each in found) >= 30
    assert sum(each is not None for each in found) >= 25


def test_its_shapes_are_known_without_running_it() -> None:
    x = torch.randn(2, 3, 8)
    torch.library.opcheck(ADD_NORM_LINEAR, (x, x + 1, torch.randn(8), EPS, 0.0, torch.randn(12, 8), None, "gelu"))
    torch.library.opcheck(ADD_NORM_LINEAR, (x, x + 1, None, EPS, 1.0, torch.randn(12, 8), torch.randn(12), ""))
    before = torch.randn(8, 6), torch.randn(8), x + 1, torch.randn(8), EPS, 0.0
    torch.library.opcheck(LINEAR_ADD_NORM_LINEAR, (x[..., :6], *before, torch.randn(12, 8), None, "silu"))
