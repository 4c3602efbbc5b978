"""The kernel of a norm and a linear over it, interpreted on a CPU and at real sizes on a GPU."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.linear import linear
from piecegraph.passes.ops.norm_linear import add_norm_linear
from piecegraph.passes.ops.rms_norm import add_rms_norm
from tests.compiled_for_gpu import compile_for_gpu
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted


def check_interpreted() -> None:
    import triton

    from piecegraph.passes.kernels.norm.norm_linear import norm_matvec_kernel

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        for activation in ("", "silu", "gelu", "gelu_tanh"):
            for columns, size, has_bias, has_weight in (
                (20, 256, True, True),
                (32, 320, False, True),
                (8, 192, False, False),
            ):
                x, residual = torch.randn(2, 1, size).to(dtype)
                norm_weight = torch.randn(size).to(dtype) if has_weight else None
                weight = (torch.randn(columns * (2 if activation else 1), size) / size**0.5).to(dtype)
                bias = torch.randn(weight.shape[0]).to(dtype) if has_bias else None
                out = torch.full((1, columns), float("nan"), dtype=dtype)
                total = torch.full((1, size), float("nan"), dtype=dtype)
                norm_matvec_kernel[(triton.cdiv(columns, 8),)](
                    x, residual, norm_weight, weight, bias, total, out, columns, 1e-6, 1.0,
                    SIZE=size, COLUMNS=triton.next_power_of_2(size), BLOCK_N=8, BLOCK_K=128,
                    ACTIVATION=activation, OVERLAP=False,
                )  # fmt: skip
                wanted, wanted_total = add_norm_linear(x, residual, norm_weight, 1e-6, 1.0, weight, bias, activation)
                assert torch.equal(total, wanted_total)
                tolerance = {torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
                torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """Sizes that fill no block, a bias and a norm's weight or none, every activation."""
    interpreted(check_interpreted)


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_it_compiles_for_a_gpu(activation: str, has_weights: bool) -> None:
    """The kernel compiles with a norm's weight and a bias, and without."""
    from piecegraph.passes.kernels.norm.norm_linear import norm_matvec_kernel

    short = torch.empty(0, dtype=torch.bfloat16)
    optional = short if has_weights else None
    arguments = {
        "x": short, "residual": short, "norm_weight": optional, "weight": short, "bias": optional, "total": short,
        "out": short, "num_columns": 3072, "eps": 1e-6, "offset": 0.0, "SIZE": 1536, "COLUMNS": 2048, "BLOCK_N": 4,
        "BLOCK_K": 1024, "ACTIVATION": activation, "OVERLAP": True,
    }  # fmt: skip
    compile_for_gpu(norm_matvec_kernel, arguments, {"num_warps": 4, "num_stages": 1, "launch_pdl": True})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "size", "activation"), [(4096, 1024, ""), (6144, 1024, "silu"), (1536, 4096, ""), (1024, 8192, "")]
)
def test_a_chain_in_a_graph_is_what_its_parts_are(columns: int, size: int, activation: str) -> None:
    """Of one row, and of two apart; 50 replays bitwise, and as good as the two ops."""
    torch.manual_seed(0)
    weight = (torch.randn(columns, size, device="cuda") / size**0.5).bfloat16()
    norm_weight = torch.rand(size, device="cuda").bfloat16()
    for num_rows in (1, 2):
        x, residual = torch.randn(2, num_rows, size, device="cuda").bfloat16()
        normed, total = add_rms_norm(x, residual, norm_weight, 1e-6, 0.0)
        apart = linear(normed, weight, None, activation)

        def both(x: torch.Tensor = x, residual: torch.Tensor = residual) -> tuple[torch.Tensor, torch.Tensor]:
            return add_norm_linear(x * 1.0, residual, norm_weight, 1e-6, 0.0, weight, None, activation)

        wanted, wanted_total = both()
        assert torch.equal(wanted_total, total)
        torch.testing.assert_close(wanted, apart, atol=2e-2, rtol=2e-2)
        assert_replays_equal(both)
