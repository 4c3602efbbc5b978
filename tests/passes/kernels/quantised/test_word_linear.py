"""Linears over 4-bit weights in words: in Triton's interpreter, compiled for GPUs, and at real sizes on a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.quantised import word_linear as kernels
from piecegraph.passes.kernels.quantised.words import to_words
from piecegraph.passes.ops.quantised.grouped_linear import GROUPED_LINEAR
from tests.compiled_for_gpu import compile_for_gpu, compiled_for_gpu, stack_bytes
from tests.gpus import H200, SHARED_BYTES
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import Weights, integers, relative_rms, split_everything

GROUPS = (0, 32, 64, 128, 256)


def in_words(num_columns: int, size: int, group: int, dtype: torch.dtype) -> Weights:
    """Random weights, each group with an offset."""
    plain = integers(num_columns, size, bits=4, group=group, offset=True, dtype=dtype)
    values = torch.stack((plain.values & 15, plain.values >> 4), -1).flatten(-2)
    return Weights(values=to_words(values), scale=plain.scale, block=plain.block)


def check(num_rows: int, group: int, *, num_columns: int = 70, with_bias: bool = True) -> None:
    """A row of NaN spoils no others. The interpreter multiplies no bfloat16."""
    weights = in_words(num_columns, 512, group, torch.float16)
    x, bias = torch.randn(num_rows, 512).half(), torch.randn(num_columns).half()
    x[-1] = float("nan")
    found = kernels.word_linear_on_gpu(x, weights.values, weights.scale, bias if with_bias else None)
    assert found.dtype is torch.float16
    wanted = x[:-1].double() @ weights.floats().T + (bias.double() if with_bias else 0)
    assert relative_rms(found[:-1], wanted) < 1e-3, group


def check_few_rows() -> None:
    """Groups of every size, and a number of channels that no tile divides."""
    for group in GROUPS:
        check(3, group)


def check_many_rows() -> None:
    """Tiles of many rows."""
    for group in (0, 32, 128):
        check(67, group)


def check_more_rows() -> None:
    """A part of the weights after another is made floats, which the library multiplies."""
    kernels.MAX_WORD_ROWS, kernels.FLOAT_BYTES = 4, 40 * 512 * 2
    for group in GROUPS:
        check(5, group)


def check_split_sums() -> None:
    """Parts of a sum, the last of which is shorter, are added."""
    added = split_everything(kernels)
    for with_bias in (True, False):
        check(2, 32, num_columns=6, with_bias=with_bias)
    assert all(len(parts) > 1 for parts in added) and len(added) == 2


@pytest.mark.parametrize("case", [check_few_rows, check_many_rows, check_more_rows, check_split_sums])
def test_the_interpreted_kernel_equals_float64(case: object) -> None:
    interpreted(case)  # type: ignore[arg-type]


def compiled_linear(num_rows: int, group: int, capability: int = 90) -> Any:
    """The kernel at 4096 x 4096 in bfloat16."""
    tiles = kernels.pick_word_tiles(num_rows, 4096 * 4096 // 2, SHARED_BYTES[capability])
    floats, integers32 = torch.empty(0, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    arguments = {
        "x": floats, "words": integers32, "scale": integers32, "bias": None, "out": floats, "num_columns": 4096,
        "size": 4096, "num_groups": 4096 // group, "num_rows": num_rows, "num_blocks": 8, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages, "GROUP": group, "PACKED_MATH": True,
        "OVERLAP": capability >= 90,
    }  # fmt: skip
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compiled_for_gpu(kernels.word_linear_kernel, arguments, options, capability=capability)


@pytest.mark.parametrize(
    ("num_rows", "group"),
    [(1, 128), pytest.param(32, 32, marks=pytest.mark.slow), pytest.param(128, 128, marks=pytest.mark.slow)],
)
def test_it_compiles_for_hopper(num_rows: int, group: int, tmp_path: Path) -> None:
    """With tensor cores, no spilled register, and reads of 4 bytes or more."""
    compiled = compiled_linear(num_rows, group)
    ptx = compiled.asm["ptx"]
    assert "mma" in ptx and stack_bytes(compiled, tmp_path) == 0
    assert "10" in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, 0x(\w+)", ptx), "copied by 16 bytes"
    assert not re.findall(r"ld\.global\S*\.b(8|16)", ptx), "nothing is read singly"


@pytest.mark.parametrize(
    ("capability", "num_rows"),
    [(80, 1), pytest.param(89, 1, marks=pytest.mark.slow), pytest.param(89, 128, marks=pytest.mark.slow)],
)
def test_it_compiles_for_gpus_before_hopper(capability: int, num_rows: int) -> None:
    """Packed math takes only instructions that the first GPUs with bfloat16 have."""
    assert "fma.rn.bf16x2" in compiled_linear(num_rows, 128, capability).asm["ptx"]


def test_tiles_follow_rows_and_bytes() -> None:
    """Few rows have many stages; large weights many channels in a program, where rows fill it."""
    few, large = 8 * 2**20, 28 * 2**20

    def found(num_rows: int, num_bytes: int) -> tuple[int, int, int]:
        tiles = kernels.pick_word_tiles(num_rows, num_bytes, H200.shared_bytes)
        return tiles.block_m, tiles.block_n, tiles.num_stages

    for num_bytes in (few, large):
        assert [found(rows, num_bytes) for rows in (1, 16)] == [(16, 64, 6)] * 2
        assert [found(rows, num_bytes) for rows in (17, 32)] == [(32, 64, 4)] * 2
        assert [found(rows, num_bytes) for rows in (65, 256)] == [(128, 128, 3)] * 2
    assert [found(rows, few) for rows in (33, 64)] == [(64, 64, 3)] * 2
    assert [found(rows, large) for rows in (33, 64)] == [(64, 128, 4)] * 2


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values())
def test_stages_fit_into_the_memory_of_a_program(shared_bytes: int) -> None:
    """And reads are ahead of products: two stages or more."""
    for num_rows in (1, 16, 17, 32, 33, 64, 65, 128, 256):
        for num_bytes in (kernels.LARGE_BYTES, kernels.LARGE_BYTES + 1):
            tiles = kernels.pick_word_tiles(num_rows, num_bytes, shared_bytes)
            words, floats = tiles.block_n * 64, tiles.block_m * 256  # bytes of 128 columns
            held = tiles.num_stages - (shared_bytes < H200.shared_bytes)  # one at work is in registers before Hopper
            assert tiles.num_stages >= 2 and held * (words + floats + 16 * tiles.block_n) <= shared_bytes


def test_weights_become_floats_on_hopper() -> None:
    integers32 = torch.empty(0, dtype=torch.int32)
    arguments = {
        "words": integers32, "scale": integers32, "out": torch.empty(0, dtype=torch.bfloat16), "num_columns": 4096,
        "size": 4096, "num_groups": 32, "BLOCK_N": 32, "GROUP": 128, "OVERLAP": True,
    }  # fmt: skip
    assert "st.global" in compile_for_gpu(kernels.floats_of_words_kernel, arguments, {"num_warps": 4})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 3072), (6144, 4096), (4096, 14336), (1000, 640)])
def test_the_kernel_equals_float64_at_sizes_of_real_models(shape: tuple[int, int]) -> None:
    """Also inside a CUDA graph, bit by bit."""
    for group in (0, 32, 128):
        weights = in_words(*shape, group, torch.bfloat16)
        exact = weights.floats().cuda()
        words, scale = weights.values.cuda(), weights.scale.cuda()
        for num_rows in (1, 2, 8, 16, 17, 32, 64, 65, 128, 256, 257, 1000):
            x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
            bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
            found = GROUPED_LINEAR(x, words, scale, bias)
            assert relative_rms(found, x.double() @ exact.T + bias.double()) < 6e-3, (group, num_rows)
            if num_rows in (1, 64):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    again = GROUPED_LINEAR(x, words, scale, bias)
                graph.replay()
                assert torch.equal(again, found), (group, num_rows)
