"""`piecegraph::onednn_linear`: its result beside float64, and its shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.cpu.onednn_linear import ONEDNN_LINEAR
from tests.passes.relative_error import Tensors, assert_no_less_exact


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    rows, columns, size = shape
    x, weight = torch.randn(rows, size, generator=random), torch.randn(columns, size, generator=random)
    return x, weight / size**0.5, torch.randn(columns, generator=random)


def onednns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """The second over a transpose, which has the strides of the weight of a Conv1D."""
    return ONEDNN_LINEAR(x, weight, None), ONEDNN_LINEAR(x, weight.t().contiguous().t(), bias)


def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return F.linear(x, weight), F.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_as_exact_as_torchs(dtype: torch.dtype) -> None:
    """In float32 each is as good as the order it adds in; bfloat16 is torch's own linear."""
    shapes = [(1, 64, 512), (2, 96, 576), (8, 64, 1536), (33, 48, 100)]
    assert_no_less_exact(
        *(onednns, torchs, torchs, make_inputs, shapes, dtype), num_terms=lambda shape: shape[2], min_numbers=1024
    )


@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 5, 48), (5, 1, 48)])
def test_it_keeps_leading_dims(shape: tuple[int, ...]) -> None:
    x, weight = torch.ones(shape), torch.ones(7, 48)
    result = ONEDNN_LINEAR(x, weight, None)
    assert result.shape == (*shape[:-1], 7) == ONEDNN_LINEAR(x.to("meta"), weight.to("meta"), None).shape
    assert result.is_contiguous()
    assert torch.equal(result, F.linear(x, weight))
