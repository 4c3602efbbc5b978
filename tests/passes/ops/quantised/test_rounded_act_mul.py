"""A gated activation whose result is rounded has the bits of the separate ops."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.quantised.rounded_act_mul import ACT_MUL_ROUNDED
from piecegraph.passes.ops.quantised.rounded_rows import round_rows
from tests.passes.ops.quantised.test_rounded_norms import ROUNDINGS, equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "stored"), ROUNDINGS, ids=str)
def test_the_bits_are_those_of_the_separate_ops(group: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    gate_up = torch.randn(2, 3, 320).to(dtype)[..., 80:240]
    found = ACT_MUL_ROUNDED(gate_up, "silu", group, stored)
    assert equal(found, round_rows(ACT_MUL(gate_up, "silu"), group, stored))


def test_the_op_is_what_torch_wants_of_an_op() -> None:
    gate_up = torch.randn(2, 3, 320)[..., 80:240]
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(ACT_MUL_ROUNDED, (gate_up, "gelu", 32, torch.int8), test_utils=kinds)
