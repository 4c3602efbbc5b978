"""The kernel of a linear's parts: what they add up to."""

from __future__ import annotations

import pytest
import torch

from tests.compiled_for_gpu import compile_for_gpu
from tests.gpus import H200
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


@pytest.mark.parametrize(("columns", "size", "rows"), [(1024, 2048, 17), (1024, 3072, 128), (4096, 14336, 64)])
def test_it_compiles_for_a_gpu(columns: int, size: int, rows: int) -> None:
    """The layouts have narrow blocks, wide ones, and all rows of a large weight."""
    from piecegraph.passes.kernels.linear.split_linear import split_kernel
    from piecegraph.passes.kernels.linear.split_linear_config import split_config

    config = split_config(rows, columns, size, itemsize=2, gpu=H200)
    assert config is not None
    short = torch.empty(0, dtype=torch.bfloat16)
    arguments = {
        "x": short, "weight": short, "parts": torch.empty(0), "num_columns": columns, "size": size, "num_rows": rows,
        "num_tiles": config.num_tiles, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "STAGES": config.num_stages, "AHEAD": config.num_ahead, "OVERLAP": True,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
    compile_for_gpu(split_kernel, arguments, options)


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


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [33, 50, 64, 65])
def test_large_weights_in_a_graph_are_what_they_are_outside(num_rows: int) -> None:
    """Replays have the same bits, and results are near those of float64."""
    from piecegraph.passes.ops.norm_linear import linear_add_norm_linear

    torch.manual_seed(0)
    shapes = ((2048, 8192), (8192, 2048), (4096, 4096), (6144, 4096))
    down, up, output, qkv = ((torch.randn(*shape, device="cuda") / 64).bfloat16() for shape in shapes)
    for before, behind in ((down, up), (output, qkv)):
        x = torch.randn(num_rows, before.shape[1], device="cuda").bfloat16()
        residual = torch.randn(num_rows, before.shape[0], device="cuda").bfloat16()

        def chain(
            x: torch.Tensor = x, residual: torch.Tensor = residual, pair: tuple[torch.Tensor, ...] = (before, behind)
        ) -> list[torch.Tensor]:
            for _ in range(4):
                y, residual = linear_add_norm_linear(x, pair[0], None, residual, None, 1e-6, 0.0, pair[1], None, "")
                x = y[:, : x.shape[1]].contiguous()
            return [y, residual]

        assert_replays_equal(chain)
        y, total = linear_add_norm_linear(x, before, None, residual, None, 1e-6, 0.0, behind, None, "")
        wanted = x.double() @ before.double().T + residual.double()
        normed = wanted * torch.rsqrt(wanted.square().mean(-1, keepdim=True) + 1e-6)
        for found, exact in ((total, wanted), (y, normed @ behind.double().T)):
            assert float((found - exact).norm() / exact.norm()) < 6e-3
