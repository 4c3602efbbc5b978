"""Rotary tables as one op: what it computes, and that it is no less exact than the model's own calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.passes.ops.rotary_tables import ROTARY_TABLES
from tests.interpreter import interpreted
from tests.passes.relative_error import Tensors, assert_no_less_exact

SHAPES = [(num_tokens, dim) for num_tokens in (1, 7, 300) for dim in (32, 64, 96, 128, 256)]
MAX_POSITION = 1_000_000
SCALING = 1.138629436111989


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    """Positions up to the last, of which two are always there, and frequencies that float32 has."""
    num_tokens, dim = shape
    positions = torch.randint(MAX_POSITION + 1, (num_tokens,), generator=random)
    positions[:2] = torch.tensor([MAX_POSITION, 0])[:num_tokens]
    return positions, 1.0 / (10_000.0 ** (torch.arange(0, dim, 2) / dim))


def by_model(positions: torch.Tensor, inv_freq: torch.Tensor) -> Tensors:
    """Return the tables as transformers' LlamaRotaryEmbedding spells them."""
    frequencies = (inv_freq[None, :, None] @ positions[None, None, :].to(inv_freq.dtype)).transpose(1, 2)
    angles = torch.cat((frequencies, frequencies), dim=-1)
    return (angles.cos() * SCALING).squeeze(0), (angles.sin() * SCALING).squeeze(0)


def check_against_model(
    device: str, op: Callable[..., Tensors] = ROTARY_TABLES, shapes: Sequence[tuple[int, int]] = SHAPES
) -> None:
    def fused(positions: torch.Tensor, inv_freq: torch.Tensor) -> Tensors:
        return op(positions, inv_freq, SCALING)

    assert_no_less_exact(fused, by_model, by_model, make_inputs, shapes, torch.float32, device)


def check_interpreted() -> None:
    """Few, for the interpreter is slow."""
    from piecegraph.passes.kernels.elementwise.rotary_tables import rotary_tables_on_gpu

    check_against_model("cpu", rotary_tables_on_gpu, ((1, 32), (7, 96), (300, 64), (7, 256)))


def test_it_is_no_less_exact_than_the_models_own() -> None:
    check_against_model("cpu")


def test_the_interpreted_kernel_is_no_less_exact_than_the_models_own() -> None:
    interpreted(check_interpreted)


@pytest.mark.gpu
def test_the_kernel_is_no_less_exact_than_the_models_own() -> None:
    check_against_model("cuda")


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_it_gives_the_models_bits(shape: tuple[int, int]) -> None:
    inputs = make_inputs(torch.Size(shape), torch.Generator().manual_seed(0))
    for found, wanted in zip(ROTARY_TABLES(*inputs, SCALING), by_model(*inputs), strict=True):
        assert found.shape == shape and found.dtype == torch.float32
        assert torch.equal(found, wanted)


def test_the_op_is_what_torch_wants_of_an_op() -> None:
    """Schema, fake results and aliasing; results without gaps, though what it takes has some."""
    positions, inv_freq = torch.arange(12)[::2], torch.rand(16)[::2]
    torch.library.opcheck(ROTARY_TABLES, (positions, inv_freq, 1.0), test_utils=("test_schema", "test_faketensor"))
    for table in ROTARY_TABLES(positions, inv_freq, 1.0):
        assert table.is_contiguous()
    for table in ROTARY_TABLES(positions[:0], inv_freq, 1.0):
        assert table.shape == (0, 16)


def test_a_number_of_tokens_may_be_unknown() -> None:
    """The number of tokens may even be zero."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        num_tokens = shapes.create_unbacked_symint()
        positions = torch.empty(num_tokens, dtype=torch.int64)
        for table in ROTARY_TABLES(positions, torch.empty(8), 1.0):
            assert table.shape == (num_tokens, 16)
            assert table.dtype == torch.float32
