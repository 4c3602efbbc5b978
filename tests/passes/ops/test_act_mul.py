"""A gated activation as one op: what it computes, and that rounding once is no worse than rounding twice."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.act_mul import ACT_MUL, ACTIVATIONS
from tests.passes.relative_error import Tensors, assert_no_less_exact

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (16, 48, 64, 100, 128, 200, 256, 384, 512, 768)
SHAPES: list[tuple[int, ...]] = [(rows, size) for rows in (1, 2, 3, 8, 17, 32) for size in SIZES]
SHAPES += [(1, rows, size) for rows in (1, 4, 9, 16) for size in (8, 24, 32, 56, 72, 96, 112, 136, 160, 192)]


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    return (torch.randn((*shape[:-1], 2 * shape[-1]), generator=random) * 2,)


def check_against_torch(activation: str, dtype: torch.dtype, device: str) -> None:
    def unfused(gate_up: torch.Tensor) -> Tensors:
        gate, up = gate_up.chunk(2, -1)
        return (ACTIVATIONS[activation](gate) * up,)

    assert len(SHAPES) >= 100
    assert_no_less_exact(
        lambda gate_up: (ACT_MUL(gate_up, activation),), unfused, unfused, make_inputs, SHAPES, dtype, device
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_no_less_exact_than_torch(activation: str, dtype: torch.dtype) -> None:
    check_against_torch(activation, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_is_no_less_exact_than_torch(activation: str, dtype: torch.dtype) -> None:
    check_against_torch(activation, dtype, "cuda")


def test_gate_is_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, 2.0, 10.0, 100.0]])
    expected = torch.nn.functional.silu(gate_up[:, :2]) * gate_up[:, 2:]
    torch.testing.assert_close(ACT_MUL(gate_up, "silu"), expected)


def test_the_op_is_what_torch_wants_of_an_op() -> None:
    """Schema, fake results and aliasing, with rows that lie apart."""
    gate_up = torch.randn(2, 3, 24)[..., :16]
    torch.library.opcheck(ACT_MUL, (gate_up, "gelu"), test_utils=("test_schema", "test_faketensor"))
    assert ACT_MUL(gate_up, "gelu").is_contiguous()
