"""RMS norms as one op: what it computes, and that rounding once is no worse than rounding as models do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from tests.passes.relative_error import Tensors, assert_no_less_exact

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (16, 64, 80, 96, 128, 256, 500, 768, 1000, 1024)
SHAPES: list[tuple[int, ...]] = [(rows, size) for rows in (1, 2, 3, 7, 16, 33) for size in SIZES]
SHAPES += [(1, rows, heads, size) for rows in (1, 2, 5, 8) for heads in (1, 2, 8) for size in (64, 80, 128, 256)]


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm as transformers' LlamaRMSNorm spells it."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm as transformers' Gemma3RMSNorm spells it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + weight.float())).type_as(x)


def exact_norm(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * factor


SPELLINGS = {"llama": (llama_norm, 0.0), "gemma": (gemma_norm, 1.0)}


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    x, residual = (torch.randn(shape, generator=random) * 3 for _ in range(2))
    return x, residual, torch.randn(shape[-1], generator=random) * 0.3 + 1


def check_against(model_norm: Callable[..., torch.Tensor], offset: float, dtype: torch.dtype, device: str) -> None:
    def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return (
            *ADD_RMS_NORM(x, residual, weight, EPS, offset),
            RMS_NORM(x, weight, EPS, offset),
        )

    def unfused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        total = x + residual
        return model_norm(total, weight), total, model_norm(x, weight)

    def exact(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        total = x + residual
        return exact_norm(total, weight + offset), total, exact_norm(x, weight + offset)

    assert len(SHAPES) >= 100
    assert_no_less_exact(fused, unfused, exact, make_inputs, SHAPES, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_no_less_exact_than_the_models_own(spelling: str, dtype: torch.dtype) -> None:
    check_against(*SPELLINGS[spelling], dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_kernel_is_no_less_exact_than_the_models_own(spelling: str, dtype: torch.dtype) -> None:
    check_against(*SPELLINGS[spelling], dtype, "cuda")


def test_a_weight_is_optional_and_may_be_wider() -> None:
    x = torch.randn(3, 8).bfloat16()
    weight = torch.randn(8)
    bare = RMS_NORM(x, None, EPS, 0.0)
    assert torch.equal(bare, exact_norm(x.double(), torch.ones(8)).bfloat16())
    assert RMS_NORM(x, weight, EPS, 0.0).dtype == torch.bfloat16


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """Both results then agree on the residual stream."""
    x, residual, weight = (torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16())
    normed, total = ADD_RMS_NORM(x, residual, weight, EPS, 0.0)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, RMS_NORM(total, weight, EPS, 0.0))


def test_the_ops_are_what_torch_wants_of_an_op() -> None:
    """Schema, fake results and aliasing, with rows that lie apart."""
    x = torch.randn(2, 3, 16)[..., :8]
    weight = torch.randn(8)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(RMS_NORM, (x, weight, EPS, 1.0), test_utils=kinds)
    torch.library.opcheck(ADD_RMS_NORM, (x, x.clone(), None, EPS, 0.0), test_utils=kinds)
    assert RMS_NORM(x, weight, EPS, 1.0).is_contiguous()
    assert all(each.is_contiguous() for each in ADD_RMS_NORM(x, x, weight, EPS, 1.0))
