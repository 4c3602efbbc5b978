"""Rows are rounded as the references round them: in Triton's interpreter, compiled for sm_90, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.quantised import rounded_rows
from piecegraph.passes.ops.quantised.rounded_rows import rounded_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import E4M3, spread


def check_rounding() -> None:
    """As the references do it, a row longer than a block and a row of zeros included.

    Triton's interpreter rounds to e4m3 wrongly where a carry reaches the exponent, so those numbers are on its grid.
    """
    rounded_rows.BLOCK = 64
    x = torch.randn(5, 200) * torch.logspace(-3, 3, 5).unsqueeze(1)
    x[2] = 0
    values, step = rounded_rows.rounded_rows_on_gpu(x, 200, torch.int8)
    wanted, wanted_step = rounded_reference(x, 200, torch.int8)
    assert torch.equal(values, wanted) and torch.equal(step, wanted_step)
    x[3, 150] = float("inf")
    _, step = rounded_rows.rounded_rows_on_gpu(x, 200, torch.int8)
    assert step.isnan().flatten().tolist() == [False, False, False, True, False], "no finite answer hides it"
    x[3, 150] = 0
    near = x.to(E4M3).float()
    near[:, ::64] = rounded_rows.MAX_E4M3
    near *= 2.0 ** torch.arange(-2, 3).unsqueeze(1)
    for group in (200, 64):
        values, step = rounded_rows.rounded_rows_on_gpu(near, group, E4M3)
        assert torch.equal(spread(values, step, group), near)
        assert torch.equal(spread(*rounded_reference(near, group, E4M3), group), near)


def test_the_interpreted_kernel_equals_the_references() -> None:
    interpreted(check_rounding)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_rounding_compiles_for_hopper(dtype: torch.dtype) -> None:
    arguments = {
        "x": torch.empty(0, dtype=torch.bfloat16), "values": torch.empty(0, dtype=dtype), "step": torch.empty(0),
        "size": 4096, "group": 4096, "BLOCK": 4096, "IS_INTEGER": dtype is torch.int8, "MOST": 448.0, "OVERLAP": True,
    }  # fmt: skip
    assert "st.global" in compile_for_gpu(rounded_rows.round_rows_kernel, arguments, {"num_warps": 8})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (300, 576), (17, 14336)])
def test_the_kernel_equals_the_references(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    values, step = rounded_rows.rounded_rows_on_gpu(x, shape[1], torch.int8)
    wanted, wanted_step = rounded_reference(x, shape[1], torch.int8)
    torch.testing.assert_close(step, wanted_step, rtol=1e-6, atol=0)
    assert (values - wanted).abs().amax() <= 1 and (values == wanted).float().mean() > 0.99
    for group in (shape[1], 64):
        values, step = rounded_rows.rounded_rows_on_gpu(x, group, E4M3)
        found, near = spread(values, step, group), spread(*rounded_reference(x, group, E4M3), group)
        assert ((found - near).abs() <= 1e-5 * near.abs()).float().mean() > 0.99


@pytest.mark.gpu
def test_values_midway_between_two_steps_are_rounded_to_even() -> None:
    """The scale is 4.8125 / 448 = 11 / 1024 exactly, and 4.8125 times the nearest float32 to 1 / 448 is another number.

    Seventeen times a power of two is midway between two values of e4m3, and 17 * 11 has 8 bits, as bfloat16 has.
    """
    midway = torch.tensor([17.0, 19.0, 21.0, 23.0]) * 11 / 1024
    x = torch.cat((midway, -midway, torch.tensor([4.8125]))).bfloat16()[None]
    wanted = torch.tensor([[16.0, 20.0, 20.0, 24.0, -16.0, -20.0, -20.0, -24.0, 448.0]])
    for values, step in (
        rounded_rows.rounded_rows_on_gpu(x.cuda(), x.shape[1], E4M3),
        rounded_reference(x.cuda(), x.shape[1], E4M3),
        rounded_reference(x, x.shape[1], E4M3),
    ):
        assert step.item() == 11 / 1024
        assert torch.equal(values.cpu().float(), wanted)
