"""The kernel of a linear's parts: what they add up to."""

from __future__ import annotations

import pytest
import torch

from tests.compiled_for_gpu import compile_for_gpu
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted


def check_interpreted() -> None:
    from piecegraph.passes.kernels.linear.split_linear import split_linear_on_gpu
    from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for num_rows, columns, num_parts, num_tiles in ((3, 64, 2, 1), (70, 32, 3, 2), (64, 96, 1, 4)):
            config = SplitConfig(block_m=64, block_n=32, block_k=64, num_parts=num_parts, num_tiles=num_tiles)
            x = torch.randn(num_rows, num_parts * num_tiles * 64).to(dtype)
            weight = (torch.randn(columns, x.shape[1]) / x.shape[1] ** 0.5).to(dtype)
            parts = split_linear_on_gpu(x, weight, config)
            assert parts.shape == (num_parts, num_rows, columns)
            torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T, atol=1e-5, rtol=1e-5)


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """One block of rows and two, one part and several, of one tile and several."""
    interpreted(check_interpreted)


@pytest.mark.parametrize("block_n", [32, 64])
def test_it_compiles_for_a_gpu(block_n: int) -> None:
    from piecegraph.passes.kernels.linear.split_linear import split_kernel

    short = torch.empty(0, dtype=torch.bfloat16)
    arguments = {
        "x": short, "weight": short, "parts": torch.empty(0), "num_columns": 1024, "size": 3072, "num_rows": 128,
        "num_tiles": 6, "BLOCK_M": 64, "BLOCK_N": block_n, "BLOCK_K": 128, "STAGES": 5, "OVERLAP": True,
    }  # fmt: skip
    compile_for_gpu(split_kernel, arguments, {"num_warps": 4, "num_stages": 5, "launch_pdl": True})


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_what_it_is_outside() -> None:
    """Kernels overlap inside the graph only; results agree bit by bit, replay after replay."""
    from piecegraph.passes.ops.norm_linear import linear_add_norm_linear

    torch.manual_seed(0)
    down, up = ((torch.randn(*shape, device="cuda") / 40).bfloat16() for shape in ((1024, 2048), (2048, 1024)))
    for num_rows in (17, 64, 128, 256):
        x, residual = torch.randn(2, num_rows, 2048, device="cuda").bfloat16()
        residual = residual[:, :1024]

        def chain(x: torch.Tensor = x, residual: torch.Tensor = residual) -> list[torch.Tensor]:
            for _ in range(12):
                x, residual = linear_add_norm_linear(x, down, None, residual, None, 1e-6, 0.0, up, None, "")
            return [x]

        assert_replays_equal(chain)
