"""Linears over rounded rows: in Triton's interpreter, compiled for GPUs, and at real sizes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from piecegraph.passes.kernels.quantised import rounded_linear as kernels
from piecegraph.passes.kernels.quantised import rounded_rows
from piecegraph.passes.kernels.quantised.weight_tiles import WeightLayout
from piecegraph.passes.ops.quantised.fp8_linear import FP8_LINEAR
from piecegraph.passes.ops.quantised.int8_inputs_linear import INT8_INPUTS_LINEAR
from piecegraph.passes.ops.quantised.rounded_rows import WHOLE_TOKEN, rounded_reference
from tests.compiled_for_gpu import compiled_for_gpu
from tests.gpus import H200, SHARED_BYTES
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import (
    Weights,
    relative_rms,
    rounded_inputs,
    split_everything,
    spread,
)


def computed(weights: Weights, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute, and the exact product of the same rounded inputs."""
    group = x.shape[1] if weights.input_group == WHOLE_TOKEN else weights.input_group
    values, step = rounded_rows.rounded_rows_on_gpu(x, group, weights.values.dtype)
    found = kernels.rounded_linear_on_gpu(values, step, weights.values, weights.scale, bias, weights.block, x.dtype)
    assert found is not None
    inputs = values.double() * step.double().repeat_interleave(group, 1)[:, : x.shape[1]]
    return found, inputs @ weights.floats().T + bias.double()


def check_products() -> None:
    """Sizes that no tile divides, for few rows and for more."""
    for name, weights in rounded_inputs(70, 200).items():
        for num_rows in (3, 20):
            found, wanted = computed(weights, torch.randn(num_rows, 200), torch.randn(70))
            assert relative_rms(found, wanted) < 1e-5, (name, num_rows)


def check_split_sums() -> None:
    """Parts, the last of which is shorter, are added; those of int8 are exact integers until they are scaled."""
    added = split_everything(kernels)
    for name, weights in rounded_inputs(6, 600).items():
        found, wanted = computed(weights, torch.randn(3, 600), torch.randn(6))
        assert relative_rms(found, wanted) < 1e-5, name
    assert [parts.dtype for parts in added] == [torch.int32, torch.float32, torch.float32]
    assert all(len(parts) > 1 for parts in added)


@pytest.mark.parametrize("check", [check_products, check_split_sums])
def test_the_interpreted_kernel_equals_float64(check: Callable[[], None]) -> None:
    interpreted(check)


def compiled_linear(scheme: str, num_rows: int, num_columns: int = 4096, capability: int = 90) -> str:
    """The PTX of the kernel at 4096 input columns; few rows in parts."""
    is_part = num_rows == 1
    out = torch.bfloat16 if not is_part else torch.int32 if scheme == "int8" else torch.float32
    weights = rounded_inputs(64, 512)[scheme]
    layout = replace(WeightLayout.of(weights.values, weights.scale, weights.block), num_columns=num_columns)
    tiles = kernels.pick_rounded_tiles(num_rows, layout, SHARED_BYTES[capability])
    assert tiles is not None
    arguments = {
        "values": weights.values, "step": torch.empty(0), "weight": weights.values, "scale": weights.scale,
        "bias": None, "out": torch.empty(0, dtype=out), "num_columns": num_columns, "size": 4096,
        "num_groups": 8, "num_rows": num_rows, "num_tiles": 4, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages, "GROUP": layout.group, "BLOCK_ROWS": layout.block_rows,
        "IS_PART": is_part, "OVERLAP": capability >= 90,
    }  # fmt: skip
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compiled_for_gpu(kernels.rounded_linear_kernel, arguments, options, capability=capability)
    ptx: str = compiled.asm["ptx"]
    return ptx


@pytest.mark.parametrize("num_rows", [1, pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("scheme", ["int8", "e4m3", "e4m3 in blocks"])
def test_it_compiles_for_hopper(scheme: str, num_rows: int) -> None:
    """With tensor cores, and in the memory of a program."""
    assert "mma" in compiled_linear(scheme, num_rows)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "capability"), [("int8", 80), ("int8", 89), ("e4m3", 89)])
def test_the_largest_tile_compiles_for_gpus_before_hopper(scheme: str, capability: int) -> None:
    """In the memory of their programs, 163 and 99 KiB. GPUs before 8.9 have no e4m3."""
    assert "mma" in compiled_linear(scheme, 256, 28672, capability)


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values())
def test_stages_fit_into_the_memory_of_a_program(shared_bytes: int) -> None:
    """For every scheme, and reads are ahead of products: two stages or more. An H200 has all that its sweep found."""
    for weights in rounded_inputs(64, 512).values():
        read = WeightLayout.of(weights.values, weights.scale, weights.block)
        for layout in (replace(read, num_columns=num_columns) for num_columns in (1024, 8192, 28672)):
            for num_rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1000):
                tiles = kernels.pick_rounded_tiles(num_rows, layout, shared_bytes)
                assert tiles is not None and tiles.num_stages >= 2
                held = tiles.num_stages - (shared_bytes < H200.shared_bytes)  # before Hopper one is in registers
                assert held * (tiles.block_m + tiles.block_n) * tiles.block_k <= shared_bytes
                if shared_bytes == H200.shared_bytes:
                    assert tiles == kernels.pick_rounded_tiles(num_rows, layout, 2**30)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 3072), (6144, 4096), (4096, 14336), (1008, 576)])
def test_the_kernels_equal_float64_at_sizes_of_real_models(shape: tuple[int, int]) -> None:
    """The op, with rounded inputs: what rounding costs is in both.

    The reference must round each input as the kernel does: one of e4m3 that is midway goes a tenth elsewhere, and in
    rows whose scale has few bits one in 32 is midway. The bound is then for the output's 8 bits, whose error is at most
    2 ** -8 (3.9e-3) of each number, and the rest of it for tensor cores, whose sums within a tile have 14 bits.
    """
    for name, weights in rounded_inputs(*shape).items():
        exact = weights.floats().cuda()
        values, scale = weights.values.cuda(), weights.scale.cuda()
        for num_rows in (1, 8, 16, 17, 64, 128, 256, 1000):
            x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
            bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
            if values.dtype is torch.int8:
                found = INT8_INPUTS_LINEAR(x, values, scale[:, 0], bias)
            else:
                found = FP8_LINEAR(x, values, scale, bias, weights.block, weights.input_group)
            group = x.shape[1] if weights.input_group == WHOLE_TOKEN else weights.input_group
            inputs = spread(*rounded_reference(x, group, values.dtype), group).double()
            assert relative_rms(found, inputs @ exact.T + bias.double()) < 6e-3, (name, num_rows)
