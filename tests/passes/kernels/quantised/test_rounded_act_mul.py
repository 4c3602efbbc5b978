"""The rounded activation's kernel gives what the separate kernels give: interpreted, for sm_90, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.elementwise.act_mul import act_mul_on_gpu
from piecegraph.passes.kernels.quantised import rounded_act_mul, rounded_rows
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import E4M3


def check(gate_up: torch.Tensor, activation: str, group: int, stored: torch.dtype) -> None:
    """Bit by bit: both kernels compute the same numbers and round them by the same function."""
    values, step = rounded_act_mul.act_mul_rounded_on_gpu(gate_up, activation, group, stored)
    acted = act_mul_on_gpu(gate_up, activation)
    wanted, wanted_step = rounded_rows.rounded_rows_on_gpu(acted.flatten(0, -2), group, stored)
    assert torch.equal(step.flatten(0, -2), wanted_step)
    assert torch.equal(values.flatten(0, -2).view(torch.uint8), wanted.view(torch.uint8))


def check_layouts(dtype: torch.dtype, device: str = "cpu") -> None:
    """Whole tokens and groups, the last of which is smaller; columns of a wider tensor; zeros; no rows."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.randn(2, 3, 640, generator=generator) * 3).to(device, dtype)
    y[1, 1] = 0
    for stored in (torch.int8, E4M3):
        check(y, "silu", 320, stored)
        check(y[..., 40:240], "gelu_tanh", 100, stored)
        check(y[:0], "silu", 320, stored)
        check(y, "gelu", 128, stored)
        check(y, "silu", 48, stored)
    y[0, 1, 4] = torch.inf
    _, step = rounded_act_mul.act_mul_rounded_on_gpu(y, "silu", 128, torch.int8)
    assert step.isnan().nonzero().tolist() == [[0, 1, 0]], "no finite answer hides it"


def check_interpreted() -> None:
    """The interpreter gets bfloat16 wrong."""
    check_layouts(torch.float32)
    check_layouts(torch.float16)


def test_the_interpreted_kernel_equals_the_separate_ones() -> None:
    interpreted(check_interpreted)


@pytest.mark.parametrize(("stored", "group"), [(torch.int8, 14336), (E4M3, 128)], ids=str)
def test_it_compiles_for_hopper(stored: torch.dtype, group: int) -> None:
    groups, columns = (1, 16384) if group > 128 else (8, 128)
    arguments = {
        "gate_up": torch.empty(0, dtype=torch.bfloat16), "values": torch.empty(0, dtype=stored), "step": torch.empty(0),
        "gate_up_stride": 28672, "size": 14336, "group": group, "num_groups": 14336 // group, "ACTIVATION": "silu",
        "GROUPS": groups, "COLUMNS": columns, "MOST": 448.0, "OVERLAP": True,
    }  # fmt: skip
    ptx = compile_for_gpu(
        rounded_act_mul.act_mul_rounded_kernel, arguments, {"num_warps": min(groups * columns // 256, 16)}
    )
    assert "st.global" in ptx
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (stored is E4M3), "it is rounded from float32 at once"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3072, 8960, 14336])
@pytest.mark.parametrize("num_rows", [1, 33, 1000])
def test_the_kernel_equals_the_separate_ones_on_the_gpu(num_rows: int, size: int) -> None:
    y = torch.randn(num_rows, 2 * size, device="cuda").bfloat16()
    for stored in (torch.int8, E4M3):
        for group in (size, 128):
            check(y, "silu", group, stored)
