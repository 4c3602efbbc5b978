"""Linears over quantised weights: in Triton's interpreter, compiled for GPUs, and at real sizes on a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.quantised import weights_only as kernels
from piecegraph.passes.kernels.quantised.weight_tiles import WeightLayout
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.grouped_linear import GROUPED_LINEAR
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR
from tests.compiled_for_gpu import compile_for_gpu, compiled_for_gpu, stack_bytes
from tests.gpus import H200, SHARED_BYTES
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import (
    Weights,
    integers,
    relative_rms,
    split_everything,
    weights_only,
)

BOUND = {torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative root mean square error to float64: weights and sums are rounded once to the dtype of the input."""


def check_every_scheme() -> None:
    """Sizes that no tile divides, with a bias; rows of NaN spoil no others. The interpreter multiplies no bfloat16."""
    for dtype, num_rows in ((torch.float32, 3), (torch.float16, 20)):
        for name, weights in weights_only(70, 192, dtype).items():
            x, bias = torch.randn(num_rows, 192).to(dtype), torch.randn(70).to(dtype)
            x[-1] = float("nan")
            found = kernels.weights_only_linear_on_gpu(x, weights.values, weights.scale, bias, weights.block, dtype)
            assert found is not None and found.dtype is dtype
            wanted = x[:-1].double() @ weights.floats().T + bias.double()
            assert relative_rms(found[:-1], wanted) < BOUND[dtype], (name, dtype)


def check_split_sums() -> None:
    """Parts of a sum, the last of which is shorter, are added, and what scales them comes before or after."""
    added = split_everything(kernels)
    schemes = weights_only(6, 320, torch.float32)
    for name, weights in schemes.items():
        x, bias = torch.randn(2, 320), torch.randn(6)
        found = kernels.weights_only_linear_on_gpu(x, weights.values, weights.scale, bias, weights.block, x.dtype)
        assert found is not None
        assert relative_rms(found, x.double() @ weights.floats().T + bias.double()) < 1e-5, name
    assert len(added) == len(schemes) and all(len(parts) > 1 for parts in added)


def check_many_rows() -> None:
    """More rows are multiplied by a part of the weights as floats after another."""
    kernels.MAX_STREAMED_ROWS, kernels.MAX_STREAMED_PACKED_ROWS, kernels.FLOAT_BYTES = 4, 4, 40 * 192 * 4
    for name, weights in weights_only(70, 192, torch.float32).items():
        x, bias = torch.randn(5, 192), torch.randn(70)
        found = kernels.weights_only_linear_on_gpu(x, weights.values, weights.scale, bias, weights.block, x.dtype)
        assert found is not None
        assert relative_rms(found, x.double() @ weights.floats().T + bias.double()) < 1e-5, name


def check_groups_that_fit_no_tile() -> None:
    """The op computes those without this kernel."""
    weights = integers(16, 72, bits=8, group=24, offset=False, dtype=torch.float32)
    found = kernels.weights_only_linear_on_gpu(
        torch.randn(1, 72), weights.values, weights.scale, None, weights.block, torch.float32
    )
    assert found is None


@pytest.mark.parametrize(
    "check", [check_every_scheme, check_split_sums, check_many_rows, check_groups_that_fit_no_tile]
)
def test_the_interpreted_kernel_equals_float64(check: Any) -> None:
    interpreted(check)


def compiled_linear(scheme: str, num_rows: int, capability: int = 90) -> Any:
    """The kernel at 4096 input columns in bfloat16; many rows of weights without groups take the largest tile."""
    weights = weights_only(4096, 512, torch.bfloat16)[scheme]
    layout = WeightLayout.of(weights.values, weights.scale, weights.block)
    tiles = kernels.pick_tiles(num_rows, layout, 2, SHARED_BYTES[capability])
    assert tiles is not None
    floats = torch.empty(0, dtype=torch.bfloat16)
    arguments = {
        "x": floats, "weight": weights.values, "scale": weights.scale, "bias": None, "out": floats,
        "num_columns": 4096, "size": 4096, "length": 4096 // (2 if layout.is_packed else 1), "num_groups": 128,
        "num_rows": num_rows, "num_tiles": 8,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        "PACKED": 2 if layout.is_packed else 1, "GROUP": layout.group, "GROUPS": layout.groups_in(tiles.block_k),
        "BLOCK_ROWS": layout.block_rows, "HAS_OFFSET": layout.has_offset, "PACKED_MATH": True,
        "OVERLAP": capability >= 90,
    }  # fmt: skip
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compiled_for_gpu(kernels.weights_only_kernel, arguments, options, capability=capability)


@pytest.mark.parametrize("num_rows", [1, pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("scheme", ["int8", "int4 in groups of 32", "e4m3 in blocks"])
def test_it_compiles_for_hopper(scheme: str, num_rows: int, tmp_path: Path) -> None:
    """With tensor cores, and in the memory of a program."""
    compiled = compiled_linear(scheme, num_rows)
    assert "mma" in compiled.asm["ptx"]
    assert stack_bytes(compiled, tmp_path) == 0, "no register spills"
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, 0x(\w+)", compiled.asm["ptx"])
    assert "10" in copied, "inputs are copied by 16 bytes"
    assert len(re.findall(r"ld\.global\S*\.b(8|16)", compiled.asm["ptx"])) <= 2, "in the loop nothing is read singly"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("scheme", ["int8", "int4 in groups of 32"])
def test_the_largest_tile_compiles_for_gpus_before_hopper(scheme: str, capability: int) -> None:
    """In the memory of their programs, 163 and 99 KiB."""
    assert "mma" in compiled_linear(scheme, 256, capability).asm["ptx"]


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values())
def test_stages_fit_into_the_memory_of_a_program(shared_bytes: int) -> None:
    """For every scheme, and reads are ahead of products: two stages or more. An H200 has all that its sweep found."""
    for weights in weights_only(64, 192, torch.bfloat16).values():
        read = WeightLayout.of(weights.values, weights.scale, weights.block)
        for layout in (replace(read, num_columns=num_columns) for num_columns in (1024, 4096, 28672)):
            for num_rows, itemsize in itertools.product((1, 16, 17, 32, 33, 64, 65, 128, 129, 256), (2, 4)):
                tiles = kernels.pick_tiles(num_rows, layout, itemsize, shared_bytes)
                assert tiles is not None and tiles.num_stages >= 2
                values = tiles.block_n * tiles.block_k // (2 if layout.is_packed else 1)
                floats = tiles.block_m * tiles.block_k * itemsize
                held = tiles.num_stages - (shared_bytes < H200.shared_bytes)  # before Hopper one is in registers
                assert held * (values + floats) <= shared_bytes
                if shared_bytes == H200.shared_bytes:
                    assert tiles == kernels.pick_tiles(num_rows, layout, itemsize, 2**30)


def test_weights_become_floats_on_hopper() -> None:
    weights = weights_only(4096, 512, torch.bfloat16)["int4 in groups of 32"]
    arguments = {
        "weight": weights.values, "scale": weights.scale, "out": torch.empty(0, dtype=torch.bfloat16),
        "num_columns": 4096, "size": 4096, "num_groups": 128, "BLOCK_N": 32, "BLOCK_K": 128, "PACKED": 2, "GROUP": 32,
        "GROUPS": 4, "BLOCK_ROWS": 1, "HAS_OFFSET": True, "OVERLAP": True,
    }  # fmt: skip
    assert "st.global" in compile_for_gpu(kernels.dequantise_kernel, arguments, {"num_warps": 4})


def called(x: torch.Tensor, weights: Weights, bias: torch.Tensor) -> torch.Tensor:
    """The op of a scheme."""
    values, scale = weights.values, weights.scale
    if values.dtype is torch.float8_e4m3fn:
        out: torch.Tensor = FP8_LINEAR(x, values, scale, bias, weights.block, 0)
    elif values.dtype is torch.int8 and scale.shape[1:] == (1,):
        out = INT8_LINEAR(x, values, scale[:, 0], bias)
    else:
        out = GROUPED_LINEAR(x, values, scale, bias)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 3072), (6144, 4096), (4096, 14336), (1000, 576)])
def test_the_kernel_equals_float64_at_sizes_of_real_models(shape: tuple[int, int]) -> None:
    """Also inside a CUDA graph, bit by bit."""
    for name, made in weights_only(*shape, torch.bfloat16).items():
        exact = made.floats().cuda()
        weights = replace(made, values=made.values.cuda(), scale=made.scale.cuda())
        for num_rows in (1, 2, 8, 16, 17, 32, 64, 128, 256, 257, 1000):
            x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
            bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
            found = called(x, weights, bias)
            assert relative_rms(found, x.double() @ exact.T + bias.double()) < 6e-3, (name, num_rows)
            if num_rows in (1, 64):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    again = called(x, weights, bias)
                graph.replay()
                assert torch.equal(again, found), (name, num_rows)
