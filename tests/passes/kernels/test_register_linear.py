"""The kernel of a linear whose weights go straight to registers: which numbers it adds, interpreted, and that Triton
lays tiles out as tensor cores take them; what it computes on a GPU see `test_linear.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton

from piecegraph.passes.kernels.linear_config import RegisterConfig, linear_config
from piecegraph.passes.ops.act_mul import act_mul_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.gpus import H200
from tests.interpreter import interpreted


def check_interpreted() -> None:
    from piecegraph.passes.kernels.register_linear import register_kernel

    torch.manual_seed(0)
    for activation in ("", "silu"):
        for num_rows, columns, slices, warps, chunks, has_bias in (
            (2, 16, 1, 1, 1, True),
            (8, 48, 2, 4, 2, False),
            (5, 20, 2, 2, 3, True),
            (7, 8, 4, 8, 1, False),
        ):
            size = chunks * slices * 256
            x = torch.randn(num_rows, size)
            weight = torch.randn(columns * (2 if activation else 1), size) / size**0.5
            bias = torch.randn(weight.shape[0]) if has_bias else None
            out = torch.full((num_rows, columns), float("nan"))
            config = RegisterConfig(num_slices=slices, num_warps=warps)
            register_kernel[(triton.cdiv(columns, config.columns_of(bool(activation))),)](
                x, weight, bias, out, columns, size, num_rows,
                SLICES=slices, WARPS=warps, ACTIVATION=activation, IS_HALF=False, EMULATED=True, OVERLAP=False,
            )  # fmt: skip
            wanted = F.linear(x, weight, bias)
            wanted = act_mul_reference(wanted, activation) if activation else wanted
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_interpreted() -> None:
    """Rows and columns that fill no block, one slice and several, a bias or none, gated or not."""
    interpreted(check_interpreted)


def compiled(num_columns: int, size: int, activation: str, dtype: torch.dtype, has_bias: bool) -> Any:
    from piecegraph.passes.kernels.register_linear import register_kernel

    config = linear_config(8, num_columns, size, is_gated=bool(activation), itemsize=2, gpu=H200)
    assert isinstance(config, RegisterConfig)
    short = torch.empty(0, dtype=dtype)
    arguments = {
        "x": short, "weight": short, "bias": short if has_bias else None, "out": short,
        "num_columns": num_columns, "size": size, "num_rows": 8,
        "SLICES": config.num_slices, "WARPS": config.num_warps, "ACTIVATION": activation,
        "IS_HALF": dtype is torch.float16, "EMULATED": False, "OVERLAP": True,
    }  # fmt: skip
    return compile_for_gpu(register_kernel, arguments, {"num_warps": config.num_warps, "launch_pdl": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_columns", "size", "activation", "has_bias"),
    [(3072, 1024, "silu", False), (6144, 4096, "", True), (4096, 4096, "", False), (2048, 2048, "gelu", True)],
)
def test_on_a_gpu_tiles_are_laid_out_as_tensor_cores_take_them(
    num_columns: int, size: int, activation: str, has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loaded sixteen bytes at a time."""
    from piecegraph.passes.kernels.register_linear import check_layout

    made = []
    compile_with_triton = triton.compile

    def remembered(*args: Any, **options: Any) -> Any:
        made.append(compile_with_triton(*args, **options))
        return made[-1]

    monkeypatch.setattr(triton, "compile", remembered)
    ptx = compiled(num_columns, size, activation, dtype, has_bias)
    check_layout(made[0].asm["ttgir"])
    assert ptx.count("mma.sync") == 2 * 4 * 4  # two chunks, four stretches of x, two pairs of lines, two halves
    assert ptx.count("ld.global.v4") == 2 * 8 + 8  # a chunk of four lines twice, ahead of the loop and in it; and of x
    assert "spill" not in ptx and "ld.local" not in ptx and "cp.async" not in ptx


LAYOUT = (
    "#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [8, 4], warpsPerCTA = [2, 1], order = [1, 0]}>"
)
ASM = '  %1 = tt.elementwise_inline_asm "mma" %a, %b : tensor<16x32xbf16, #blocked> -> tensor<16x32xf32, #blocked>'


@pytest.mark.parametrize(
    ("ttgir", "found"),
    [
        ("", "nothing"),
        (f"{LAYOUT}\n", "nothing"),
        (f"{LAYOUT.replace('[8, 4]', '[4, 8]')}\n{ASM}", r"threadsPerWarp = \[4, 8\]"),
        (f"{LAYOUT.replace('[1, 0]', '[0, 1]')}\n{ASM}", r"order = \[0, 1\]"),
        (f"{LAYOUT.replace('[2, 1]', '[1, 2]')}\n{ASM}", r"warpsPerCTA = \[1, 2\]"),
        (f"{LAYOUT}\n#blocked1 = #ttg.linear<{{}}>\n{ASM.replace('bf16, #blocked', 'bf16, #blocked1')}", "#blocked1"),
    ],
)
def test_another_layout_is_an_error(ttgir: str, found: str) -> None:
    from piecegraph.passes.kernels.register_linear import UnknownLayoutError, check_layout

    check_layout(f"{LAYOUT}\n{ASM}")
    with pytest.raises(UnknownLayoutError, match=found):
        check_layout(ttgir)


def test_where_the_layout_is_another_other_kernels_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning; and where a tensor does not begin at a multiple of sixteen bytes, without."""
    from piecegraph.passes.kernels import linear, register_linear

    taken: list[str] = []
    x, weight = torch.randn(4, 1024).half(), torch.randn(64, 1024).half()
    out = torch.zeros(4, 32).half()

    def refused(*arguments: Any) -> torch.Tensor:
        taken.append("register")
        raise register_linear.UnknownLayoutError("this Triton lays tiles out as nobody expects")

    def other(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, config: Any) -> torch.Tensor:
        taken.append(type(config).__name__)
        return out

    monkeypatch.setattr(register_linear._State, "refused", "")
    monkeypatch.setattr(linear, "gpu_limits", lambda device: H200)
    monkeypatch.setattr(linear, "register_linear_on_gpu", refused)
    monkeypatch.setattr(linear, "linear_on_gpu", other)
    shifted = torch.randn(4 * 1024 + 1).half()[1:].view(4, 1024)
    assert linear.linear_of_rows_on_gpu(shifted, weight, None, "silu") is out
    assert taken == ["SlicedConfig"] and not caplog.records
    for _ in range(2):
        assert linear.linear_of_rows_on_gpu(x, weight, None, "silu") is out
    assert taken == ["SlicedConfig", "register", "SlicedConfig", "SlicedConfig"]
    (record,) = caplog.records
    assert "slower kernels: this Triton lays tiles out as nobody expects" in record.getMessage()
