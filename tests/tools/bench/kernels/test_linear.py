"""Tests of the linears and layouts of the bench; its times can only be tested on a GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from piecegraph.passes.kernels.linear.linear_config import (
    SLICED_ROWS,
    SlicedConfig,
    linear_config,
)
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.tools.bench.kernels.linear import (
    KERNELS,
    MODELS,
    MOST_STREAMED_ROWS,
    Linear,
    _expected,
    kernel_of,
    layouts,
    linears_of,
    main,
    setting,
)
from tests.gpus import H200


def test_linears_are_those_of_the_models() -> None:
    small, large = (linears_of(model) for model in MODELS)
    assert [(each.name, each.num_weight_rows, each.size) for each in small] == [
        ("qkv", 4096, 1024),
        ("output", 1024, 2048),
        ("gate_up", 6144, 1024),
        ("down", 1024, 3072),
        ("head", 151936, 1024),
    ]
    assert sum(each.weight_bytes for each in large[:4]) == 2 * (6144 + 4096 + 3 * 14336) * 4096
    assert small[0].floor_us == pytest.approx(4096 * 1024 * 2 / 4.08e6)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 128, 256])
@pytest.mark.parametrize("model", MODELS)
def test_a_sweep_has_layouts_of_every_kernel_that_takes_the_rows(model: str, num_rows: int) -> None:
    for linear in linears_of(model):
        found = layouts(linear, num_rows)
        assert len(set(found)) == len(found) == len({(kernel_of(each), setting(each)) for each in found})
        kinds = {kernel_of(each) for each in found}
        assert ("matvec" in kinds) == (num_rows in (1, 2, 4))
        assert ("sliced" in kinds) == (num_rows <= SLICED_ROWS)
        assert ("matmul" in kinds) == (num_rows > 1)
        assert ("streamed" in kinds) == (1 < num_rows <= MOST_STREAMED_ROWS)
        assert kinds <= set(KERNELS)
        for each in found:
            if isinstance(each, SlicedConfig):
                assert each.num_slices * each.block_k * each.num_tiles == linear.size
                assert each.num_held <= each.num_tiles and num_rows <= each.block_m
            elif isinstance(each, StreamedConfig):
                assert each.block_m >= num_rows and linear.size % each.block_k == 0
            elif each.block_m:
                assert linear.size % each.block_k == 0


def test_what_the_op_takes_by_itself_is_among_them() -> None:
    for linear in linears_of("qwen3-0.6b")[:4]:
        for num_rows in (1, 8, 32):
            default = linear_config(
                num_rows, linear.num_columns, linear.size, is_gated=bool(linear.activation), itemsize=2, gpu=H200
            )
            assert default in layouts(linear, num_rows)


def test_what_is_expected_of_a_gated_linear_is_its_activation_times_the_other_half() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(10, 8)
    gate, up = (x @ weight.t()).chunk(2, -1)
    torch.testing.assert_close(_expected(x, weight, "silu"), torch.nn.functional.silu(gate) * up)
    assert Linear(name="gate_up", num_columns=5, size=8, activation="silu").num_weight_rows == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1 and "needs one" in result.output


@pytest.mark.gpu
def test_it_times_the_library_and_ours() -> None:
    arguments = ["--model", "qwen3-0.6b", "--linear", "output", "--linear", "gate_up", "--rows", "1,8,32"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "WRONG" not in result.output and "failed" not in result.output
    assert result.output.count("default: ") == 6 + 1 and result.output.count("library") == 6 + 1  # one after a norm
