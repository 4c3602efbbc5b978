"""Rows by their numbers as one op: it is indexing, for any number of sources."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.passes.ops.take_rows import TAKE_ROWS


def test_the_op_equals_indexing_on_a_cpu() -> None:
    one, other, index = torch.randn(1, 5, 8)[..., ::2], torch.randn(1, 5, 2, 3), torch.tensor([4, 0, -1, 4])
    first, second = TAKE_ROWS([one, other], index, 1, True)
    assert torch.equal(first, one[:, index]) and torch.equal(second, other[:, index])
    assert first.is_contiguous() and second.is_contiguous()
    (found,) = TAKE_ROWS([other[0]], index.view(2, 2), 0, True)
    assert torch.equal(found, other[0][index.view(2, 2)])


def test_a_number_outside_raises_on_a_cpu() -> None:
    with pytest.raises(IndexError):
        TAKE_ROWS([torch.randn(5, 8)], torch.tensor([5]), 0, True)
    with pytest.raises(IndexError):
        TAKE_ROWS([torch.randn(5, 8)], torch.tensor([-1]), 0, False)


def test_the_op_is_what_torch_wants_of_an_op() -> None:
    inputs = ([torch.randn(1, 5, 8), torch.randn(1, 5, 3)], torch.tensor([4, 0, 4]), 1, False)
    torch.library.opcheck(TAKE_ROWS, inputs, test_utils=("test_schema", "test_faketensor"))


def test_a_number_of_rows_may_be_unknown() -> None:
    """The number of rows may even be zero."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        num_rows, num_taken = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
        source = torch.empty(1, num_rows, 8, dtype=torch.bfloat16)
        (found,) = TAKE_ROWS([source], torch.empty(num_taken, dtype=torch.int64), 1, False)
        assert found.shape == (1, num_taken, 8) and found.dtype == torch.bfloat16
