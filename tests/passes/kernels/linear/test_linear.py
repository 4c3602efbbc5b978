"""The kernels of a linear against torch, interpreted on a CPU and at real sizes on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.linear.linear_config import LinearConfig, linear_config
from piecegraph.passes.ops.act_mul import act_mul_reference
from piecegraph.passes.ops.linear import linear
from tests.compiled_for_gpu import compiled_for_gpu, stack_bytes
from tests.gpus import H200
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted

LARGE = [(4096, 4096, ""), (6144, 4096, ""), (6160, 4096, ""), (28672, 4096, "silu")]
"""Linears of a layer of Llama-8B, and one whose columns fill no whole blocks."""

QWEN3 = [(4096, 1024, ""), (1024, 2048, ""), (6144, 1024, "silu"), (1024, 3072, "")]
"""Rows of the weight, size, activation: a layer of Qwen3-0.6B."""


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Return the linear computed in float64."""
    out = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    return act_mul_reference(out, activation) if activation else out


def rms(error: torch.Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def check_interpreted() -> None:
    import triton

    from piecegraph.passes.kernels.linear.linear import matmul_kernel, matvec_kernel

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for activation in ("", "silu", "gelu", "gelu_tanh"):
            for num_rows, columns, size, has_bias in (
                (1, 20, 256, True),
                (2, 32, 320, False),
                (3, 24, 256, True),
                (70, 16, 128, False),
            ):
                x = torch.randn(num_rows, size).to(dtype)
                weight = (torch.randn(columns * (2 if activation else 1), size) / size**0.5).to(dtype)
                bias = torch.randn(weight.shape[0]).to(dtype) if has_bias else None
                out = torch.full((num_rows, columns), float("nan"), dtype=dtype)
                if num_rows <= 2:
                    matvec_kernel[(triton.cdiv(columns, 8),)](
                        x, weight, bias, out, columns, size,
                        ROWS=num_rows, BLOCK_N=8, BLOCK_K=128, ACTIVATION=activation, OVERLAP=False,
                    )  # fmt: skip
                else:
                    matmul_kernel[(triton.cdiv(columns, 16), triton.cdiv(num_rows, 64))](
                        x, weight, bias, out, columns, size, num_rows,
                        BLOCK_M=64, BLOCK_N=16, BLOCK_K=64, STAGES=2, AHEAD=0, ACTIVATION=activation, OVERLAP=False,
                    )  # fmt: skip
                wanted = exact(x, weight, bias, activation)
                unfused = F.linear(x, weight, bias)
                unfused = act_mul_reference(unfused, activation) if activation else unfused
                floor = torch.finfo(dtype).eps * rms(wanted)
                assert rms(out - wanted) <= 1.1 * rms(unfused - wanted) + floor, (dtype, activation, num_rows)


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """Any number of rows, a bias or none, columns and sizes that fill no block, every activation."""
    interpreted(check_interpreted)


@pytest.mark.parametrize(
    ("rows", "columns", "size", "activation"),
    [(64, 6144, 4096, ""), (128, 14336, 4096, "silu"), (128, 14336, 8192, "gelu")],
)
def test_large_weights_compile_for_a_gpu(rows: int, columns: int, size: int, activation: str, tmp_path: Path) -> None:
    """A program's tiles fit an H200's shared memory, and its sums fit a thread's registers."""
    from piecegraph.passes.kernels.linear.linear import matmul_kernel

    config = linear_config(rows, columns, size, is_gated=bool(activation), itemsize=2, gpu=H200)
    assert isinstance(config, LinearConfig)
    short = torch.empty(0, dtype=torch.bfloat16)
    arguments = {
        "x": short, "weight": short, "bias": None, "out": short, "num_columns": columns, "size": size,
        "num_rows": rows, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "STAGES": config.num_stages, "AHEAD": config.num_ahead, "ACTIVATION": activation, "OVERLAP": True,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    assert stack_bytes(compiled_for_gpu(matmul_kernel, arguments, options), tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("weight_rows", "size", "activation"),
    [*QWEN3, *LARGE, (1536, 576, ""), (2304, 640, "gelu_tanh")],
)
def test_the_kernel_equals_the_reference_at_sizes_of_real_models(
    weight_rows: int, size: int, activation: str, dtype: torch.dtype
) -> None:
    """RMS error to float64 over 8 seeds at most 1.1 times that of the library's, and the activation in torch."""
    for num_rows in (1, 2, 3, 8, 17, 32, 33, 64, 65, 128, 300):
        ours, torchs = 0.0, 0.0
        for seed in range(8):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(1, num_rows, size, device="cuda", generator=generator).to(dtype)
            weight = (torch.randn(weight_rows, size, device="cuda", generator=generator) / size**0.5).to(dtype)
            bias = torch.randn(weight_rows, device="cuda", generator=generator).to(dtype) if seed % 2 else None
            wanted = exact(x, weight, bias, activation)
            unfused = F.linear(x, weight, bias)
            unfused = act_mul_reference(unfused, activation) if activation else unfused
            ours += rms(linear(x, weight, bias, activation) - wanted)
            torchs += rms(unfused - wanted)
        assert ours <= 1.1 * torchs, (num_rows, ours, torchs)


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_what_it_is_outside() -> None:
    """Kernels overlap inside the graph only; results agree bit by bit, replay after replay."""
    torch.manual_seed(0)
    for num_rows in (1, 2, 8, 64, 128):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        layers = [
            [
                (torch.randn(rows, size, device="cuda") / size**0.5).bfloat16()
                for rows, size in ((2048, 1024), (1024, 2048))
            ]
            for _ in range(12)
        ]

        def chain(x: torch.Tensor = x, layers: list[list[torch.Tensor]] = layers) -> list[torch.Tensor]:
            for up, down in layers:
                x = linear(linear(x, up, None, ""), down, None, "")
            return [x]

        assert_replays_equal(chain)
