"""The kernel of a streamed linear: what it computes, interpreted, and that Triton asks for its weights ahead of the
wait. At real sizes on a GPU see `test_linear.py` and `test_norm_linear.py` of the ops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig, streamed_config, streamed_parts_config
from piecegraph.passes.ops.act_mul import act_mul_reference
from tests.compiled_for_gpu import asked_before_the_wait, compiled_for_gpu, stack_bytes
from tests.gpus import H200
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted


def check_interpreted() -> None:
    from piecegraph.passes.kernels.linear.streamed_linear import streamed_linear_on_gpu, streamed_parts_on_gpu

    torch.manual_seed(0)
    for num_rows, columns, of_program, tiles, num_parts, has_bias in (
        (1, 64, 64, 3, 1, False),
        (8, 128, 32, 1, 1, True),
        (5, 80, 24, 4, 1, True),
        (16, 64, 64, 6, 3, False),
    ):
        x = torch.randn(num_rows, tiles * 32)
        config = StreamedConfig(
            block_m=16, block_n=64, num_columns=of_program, block_k=32, num_stages=3, num_parts=num_parts
        )
        for activation in ("", "silu") if num_parts == 1 else ("",):
            weight = torch.randn(columns * (2 if activation else 1), x.shape[1]) / x.shape[1] ** 0.5
            bias = torch.randn(weight.shape[0]) if has_bias else None
            if num_parts > 1:
                parts = streamed_parts_on_gpu(x, weight, config)
                assert parts.shape == (num_parts, num_rows, columns) and parts.dtype is torch.float32
                for number, (first, end) in enumerate(pairwise(range(0, x.shape[1] + 1, x.shape[1] // num_parts))):
                    torch.testing.assert_close(parts[number], x[:, first:end] @ weight[:, first:end].T)
                continue
            wanted = F.linear(x, weight, bias)
            wanted = act_mul_reference(wanted, activation) if activation else wanted
            joined = replace(config, is_joined=activation != "" and of_program <= 32)
            out = streamed_linear_on_gpu(x, weight, bias, activation, joined)
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """Rows and columns that fill no block, one tile and several, a bias or none, gated or not, and each part."""
    interpreted(check_interpreted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "size", "activation"),
    [
        (2, 14336, 4096, "silu"), (16, 14336, 4096, "silu"), (32, 14336, 4096, "gelu"), (64, 14336, 4096, "silu"),
        (16, 3072, 1024, "silu"), (32, 3072, 1024, "silu"), (4, 4864, 896, "silu"),
        (8, 4096, 1024, ""), (32, 6144, 4096, ""), (1, 4096, 14336, ""), (32, 1024, 2048, ""), (8, 1024, 3072, ""),
    ],
)  # fmt: skip
def test_on_a_gpu_weights_are_asked_for_before_the_wait(
    num_rows: int, num_columns: int, size: int, activation: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All tiles but one that a program has room for, and nothing of `x`; and all registers fit."""
    from piecegraph.passes.kernels.linear.streamed_linear import streamed_kernel

    config = streamed_config(num_rows, num_columns, size, is_gated=bool(activation), itemsize=2, gpu=H200)
    config = config or streamed_parts_config(num_rows, num_columns, size, itemsize=2, gpu=H200)
    assert config is not None
    short = torch.empty(0, dtype=dtype)
    arguments = {
        "x": short, "weight": short, "bias": None, "out": short if config.num_parts == 1 else torch.empty(0),
        "num_columns": num_columns, "size": size, "num_rows": num_rows,
        "num_tiles": size // config.block_k // config.num_parts,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "COLUMNS": config.num_columns, "JOINED": config.is_joined,
        "BLOCK_K": config.block_k, "STAGES": config.num_stages, "ACTIVATION": activation, "OVERLAP": True,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    compiled = compiled_for_gpu(streamed_kernel, arguments, options)
    weights = 2 if activation and not config.is_joined else 1
    assert asked_before_the_wait(compiled) == (weights * (config.num_stages - 1), 0)
    assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_what_it_is_outside() -> None:
    """Kernels overlap inside the graph only; results agree bit by bit, replay after replay."""
    from piecegraph.passes.ops.norm_linear import linear_add_norm_linear

    torch.manual_seed(0)
    for size, inner in ((1024, 3072), (2048, 8192)):
        layers = [
            tuple(
                (torch.randn(*shape, device="cuda") / shape[1] ** 0.5).bfloat16()
                for shape in ((size, inner), (2 * inner, size))
            )
            for _ in range(6)
        ]
        for num_rows in (1, 2, 8, 16, 32, 64):
            x = torch.randn(num_rows, inner, device="cuda").bfloat16()
            residual = torch.randn(num_rows, size, device="cuda").bfloat16()

            def chain(
                x: torch.Tensor = x,
                residual: torch.Tensor = residual,
                layers: list[tuple[torch.Tensor, ...]] = layers,
            ) -> list[torch.Tensor]:
                for down, up in layers:
                    x, residual = linear_add_norm_linear(x, down, None, residual, None, 1e-6, 0.0, up, None, "silu")
                return [x, residual]

            assert_replays_equal(chain)
