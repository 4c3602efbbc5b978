"""`piecegraph::rounded_linear` computes what linears that round their inputs compute, bit by bit."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.int8_inputs_linear import INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.rounded_linear import ROUNDED_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import round_rows
from tests.passes.kernels.quantised.quantised_inputs import relative_rms, rounded_inputs, spread

BOUND = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
"""Relative root mean square error to the exact product of what is stored. In bfloat16, sums are rounded twice where
each token and channel has a scale, and else inputs, weights and sums once each."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", rounded_inputs(4, 64))
def test_it_is_the_linear_over_rows_that_are_rounded(name: str, dtype: torch.dtype) -> None:
    weights = rounded_inputs(70, 192)[name]
    x, bias = torch.randn(2, 3, 192).to(dtype), torch.randn(70).to(dtype)
    values, step = round_rows(x, weights.input_group, weights.values.dtype)
    if weights.values.dtype is torch.int8:
        scale, wanted = weights.scale[:, 0], INT8_INPUTS_LINEAR(x, weights.values, weights.scale[:, 0], bias)
    else:
        scale = weights.scale
        wanted = FP8_LINEAR(x, weights.values, scale, bias, weights.block, weights.input_group)
    found = ROUNDED_LINEAR(values, step, weights.values, scale, bias, weights.block, weights.input_group, dtype)
    assert torch.equal(found, wanted) and found.shape == (2, 3, 70)
    group = 192 if weights.input_group < 0 else weights.input_group
    exact = spread(values.flatten(0, 1), step.flatten(0, 1), group).double() @ weights.floats().T + bias.double()
    assert relative_rms(found.flatten(0, 1), exact) < BOUND[dtype]


def test_the_op_is_what_torch_wants_of_an_op() -> None:
    weights = rounded_inputs(70, 192)["int8"]
    values, step = round_rows(torch.randn(3, 192), -1, torch.int8)
    arguments = (values, step, weights.values, weights.scale[:, 0], None, [1, 0], -1, torch.bfloat16)
    torch.library.opcheck(ROUNDED_LINEAR, arguments, test_utils=("test_schema", "test_faketensor"))
