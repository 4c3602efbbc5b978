"""The kernel of a linear whose warps have a slice of the numbers each, interpreted; on a GPU see `test_linear.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.ops.act_mul import act_mul_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.gpus import H200
from tests.interpreter import interpreted


def check_interpreted() -> None:
    import triton

    from piecegraph.passes.kernels.linear.sliced_linear import sliced_kernel

    torch.manual_seed(0)
    for activation in ("", "silu"):
        for num_rows, columns, tiles, held, has_bias in (
            (3, 16, 1, 1, True),
            (16, 24, 2, 2, False),
            (5, 8, 3, 3, True),
            (8, 20, 3, 2, False),
            (9, 8, 5, 1, True),
        ):
            size = tiles * 4 * 64
            x = torch.randn(num_rows, size)
            weight = torch.randn(columns * (2 if activation else 1), size) / size**0.5
            bias = torch.randn(weight.shape[0]) if has_bias else None
            out = torch.full((num_rows, columns), float("nan"))
            sliced_kernel[(triton.cdiv(columns, 16),)](
                x, weight, bias, out, columns, size, num_rows,
                BLOCK_M=16, BLOCK_N=16, SLICES=4, BLOCK_K=64, TILES=tiles, HELD=held,
                ACTIVATION=activation, OVERLAP=False,
            )  # fmt: skip
            wanted = F.linear(x, weight, bias)
            wanted = act_mul_reference(wanted, activation) if activation else wanted
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """Rows and columns that fill no block, tiles held, some held and none to come, a bias or none, gated or not."""
    interpreted(check_interpreted)


@pytest.mark.parametrize(
    ("num_columns", "size", "activation", "has_bias"),
    [(4096, 1024, "", False), (1024, 2048, "", True), (3072, 1024, "silu", True), (1024, 3072, "", False),
     (1024, 8192, "", False)],
)  # fmt: skip
def test_it_compiles_for_a_gpu(num_columns: int, size: int, activation: str, has_bias: bool) -> None:
    from piecegraph.passes.kernels.linear.linear_config import SlicedConfig, linear_config
    from piecegraph.passes.kernels.linear.sliced_linear import sliced_kernel

    config = linear_config(
        9, num_columns, size, is_gated=bool(activation), itemsize=2, gpu=replace(H200, can_overlap=False)
    )
    assert isinstance(config, SlicedConfig)
    short = torch.empty(0, dtype=torch.bfloat16)
    arguments = {
        "x": short, "weight": short, "bias": short if has_bias else None, "out": short,
        "num_columns": num_columns, "size": size, "num_rows": 9,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SLICES": config.num_slices, "BLOCK_K": config.block_k,
        "TILES": config.num_tiles, "HELD": config.num_held, "ACTIVATION": activation, "OVERLAP": True,
    }  # fmt: skip
    compile_for_gpu(sliced_kernel, arguments, {"num_warps": config.num_slices, "num_stages": 1, "launch_pdl": True})
